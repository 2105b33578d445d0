"""A judge of sums behind OpenAI's API, in the standard library: what a server has to answer to ``ruler``, ``rubrics`` and
``tournament``. It is told no results: it adds.

python examples/sum_judge.py --port 8000
"""

from __future__ import annotations

import argparse
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def judgement(text: str) -> dict[str, Any]:
    """Returns what the judge says about the text that a reward sends."""
    task = re.search(r"^(\d+)\+(\d+)=$", text, re.M)
    answers = re.findall(r"<answer-(?:(\w+)-)?\w{12}>\n(.*?)\n</answer-", text, re.S)
    right = int(task[1]) + int(task[2]) if task else -1
    if "The criteria:" in text:
        [(_, answer)] = answers
        met = (nearness(answer, right) == 1, answer.strip()[-1:] == str(right)[-1], not answer.strip().isdecimal())
        return {"criteria": [{"id": number, "explanation": "", "met": is_met} for number, is_met in enumerate(met, 1)]}
    if '"winner"' in text:
        first, second = (nearness(answer, right) for _, answer in answers)
        return {"explanation": "", "winner": "tie" if first == second else "A" if first > second else "B"}
    return {"scores": [{"id": int(name), "explanation": "", "score": nearness(answer, right)} for name, answer in answers]}


def nearness(answer: str, right: int) -> float:
    """Returns 1 for the right sum, at most a quarter for another one, 0 for what is no number."""
    answer = answer.strip()
    if not answer.isdecimal() or len(answer) > 9:
        return 0.0
    return 1.0 if int(answer) == right else 0.5 / (1 + abs(int(answer) - right))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open

    def do_GET(self) -> None:
        self._answer({"object": "list", "data": [{"id": "judge", "object": "model", "created": 0, "owned_by": "examples"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"]
        said = json.dumps(judgement(text))
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        usage = {"prompt_tokens": len(text) // 4, "completion_tokens": len(said) // 4}
        self._answer(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "judge", "choices": [choice], "usage": usage}
        )

    def _answer(self, value: dict[str, Any]) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Says nothing of each request."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    ThreadingHTTPServer(("127.0.0.1", parser.parse_args().port), Handler).serve_forever()
