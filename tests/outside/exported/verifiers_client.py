"""Plays episodes of an environment with the real verifiers: its loader, chat program and scoring, and a model with written answers.

verifiers_client.py NAME CONFIG ANSWERS ROWS: CONFIG and the others are JSON. Prints rewards, metrics and errors of the episodes.
"""

import asyncio
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import verifiers.v1 as vf

NAME, CONFIG, ANSWERS, ROWS = sys.argv[1], *map(json.loads, sys.argv[2:])


class Model(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Says nothing."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answer = ANSWERS[sum(message["role"] == "assistant" for message in asked["messages"])]
        said = {"role": "assistant", "content": answer}
        if isinstance(answer, list):
            calls = [{"name": name, "arguments": json.dumps(arguments)} for name, arguments in answer]
            tools = [{"index": n, "id": f"call{n}", "type": "function", "function": call} for n, call in enumerate(calls)]
            said = {"role": "assistant", "content": None, "tool_calls": tools}
        reason = "tool_calls" if isinstance(answer, list) else "stop"
        head = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "policy"}
        chunks = [
            {**head, "choices": [{"index": 0, "delta": said, "finish_reason": None}]},
            {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
            {**head, "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}},
        ]
        out = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks).encode() + b"data: [DONE]\n\n"
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(out)))
        self.end_headers()
        self.wfile.write(out)


async def main(port):
    env = vf.load_environment(vf.env_config_type(NAME).model_validate(CONFIG))
    client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{port}/v1", api_key_var="RLHF_NONE")
    async with env.serving():
        tasks = list(env.taskset)
        context = vf.ModelContext(model="policy", client=client)
        episodes = await asyncio.gather(*(env.run_episode(tasks[row], context) for row in ROWS))
    told = []
    for episode in episodes:
        [trace] = episode.traces
        rewards = {name: one and one.value for name, one in trace.rewards.items()}
        errors = [error.message for error in (*episode.errors, *trace.errors)]
        told.append({"ok": episode.ok, "rewards": rewards, "metrics": dict(trace.metrics), "errors": errors})
    print(json.dumps(told))


server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
threading.Thread(target=server.serve_forever, daemon=True).start()
asyncio.run(main(server.server_address[1]))
