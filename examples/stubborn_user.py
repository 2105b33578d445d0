"""A server of OpenAI's API that plays the users of sums: it knows the sum that it wants, and asks again until it gets it.

python examples/stubborn_user.py --port 8000

It stands for a language model as ``--agent.serve``: with it a run shows on a small machine how a user teaches. A user reads its
goal in the system message, as ``17+35=``, and writes the mark ``[DONE]`` when the last message is the right number.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def says(messages: Sequence[Mapping[str, str]]) -> str:
    """Returns the user's next message."""
    goal = re.search(r"^(\d+)\+(\d+)=$", messages[0]["content"], re.M)
    if goal is None:
        return "[GIVE UP]"
    right = str(int(goal[1]) + int(goal[2]))
    return "[DONE]" if messages[-1]["content"].strip() == right else goal[0]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open

    def do_GET(self) -> None:
        self._answer({"object": "list", "data": [{"id": "user", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = {"role": "assistant", "content": says(body["messages"])}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": sum(len(each["content"].split()) for each in body["messages"]), "completion_tokens": 1}
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "user", "choices": [choice]}
        self._answer({**answer, "usage": {**usage, "total_tokens": sum(usage.values())}})

    def _answer(self, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Says nothing of each request."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    ThreadingHTTPServer(("127.0.0.1", parser.parse_args().port), Handler).serve_forever()
