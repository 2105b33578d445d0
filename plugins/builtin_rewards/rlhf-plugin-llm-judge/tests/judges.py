"""A server of OpenAI's API that says what a test tells it."""

import asyncio
import json
import re

from aiohttp import web
from rlhf_authoring.served import Served

from rlhf_host import Segment, Task, Trajectory


class Raw(str):
    """Not JSON, though it says so."""


class Judge(Served):
    """``say(text, number)`` gives the words, a status, a time to wait before, or a whole answer: ``Raw`` text or a JSON value."""

    path = "/v1"

    def __init__(self, say, key=None, models=None, usage=True, takes_s=0.0):
        self.say, self.key, self.models, self.usage, self.takes_s, self.asked = say, key, models, usage, takes_s, []
        self.open = self.most = 0

    def routes(self):
        return [web.post("/v1/chat/completions", self._chat), web.get("/v1/models", self._models)]

    def _allowed(self, request):
        return self.key is None or request.headers.get("Authorization") == f"Bearer {self.key}"

    async def _models(self, request):
        if self.models is not None:
            return web.Response(text=self.models, content_type="application/json")
        return web.json_response({"object": "list", "data": []}, status=200 if self._allowed(request) else 401)

    async def _chat(self, request):
        body = await request.json()
        self.asked.append(body)
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await asyncio.sleep(self.takes_s)
            said = self.say(body["messages"][-1]["content"], len(self.asked))
            if isinstance(said, float):
                await asyncio.sleep(said)
            if isinstance(said, int):
                return web.json_response({"error": {"message": "no"}}, status=said, headers={"retry-after-ms": "5"})
            if isinstance(said, Raw):
                return web.Response(text=said, content_type="text/html" if said.startswith("<") else "application/json")
            if isinstance(said, list | dict):
                return web.json_response(said)
            message = {"role": "assistant", "content": said if isinstance(said, str) else "Score: 1"}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
            if self.usage:
                answer["usage"] = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
            return web.json_response(answer)
        finally:
            self.open -= 1


def answers_in(text):
    """The answers that a judge compares, by their names."""
    return {name: answer for name, _, answer in re.findall(r"<answer-(\w+)-(\w{12})>\n(.*?)\n</answer-\1-\2>", text, re.S)}


def answer_in(text):
    """The only answer that a judge reads."""
    return re.search(r"<answer-(\w+)>\n(.*)\n</answer-\1>", text, re.S)[2]


def scores(worth):
    """A judge of groups that finds each answer worth what the function says."""

    def say(text, number):
        items = [
            {"id": int(name), "explanation": answer[:9], "score": worth(answer)} for name, answer in answers_in(text).items()
        ]
        return json.dumps({"scores": items})

    return say


def wins(worth):
    """A judge of pairs that prefers the answer of more worth."""

    def say(text, number):
        first, second = map(worth, answers_in(text).values())
        return json.dumps({"explanation": "", "winner": "tie" if first == second else "A" if first > second else "B"})

    return say


def met(holds):
    """A judge of criteria: ``holds(criterion, answer)``."""

    def say(text, number):
        listed = re.findall(r"^(\d+)\. (.*)$", text.partition("The criteria:\n")[2], re.M)
        items = [{"id": int(n), "explanation": "so", "met": holds(criterion, answer_in(text))} for n, criterion in listed]
        return json.dumps({"criteria": items})

    return say


def row(*turns, prompt="1+1=", label=None, metadata=None, role="", number=0):
    """An answer: what was said, and in turn what the other side said to it."""
    kinds = ["action", "observation"] * len(turns)
    texts = {0: str(prompt), **dict(enumerate(turns, 1))}
    segments = [Segment("prompt", [0]), *(Segment(kinds[n - 1], [n]) for n in range(1, len(turns) + 1))]
    task = Task(prompt, label, metadata or {})
    decode = lambda ids: "".join(texts[token] for token in ids)  # noqa: E731
    return Trajectory(f"e{number}", "g", task, segments, decode=decode, role=role)


def judged(plugin, *rows):
    """Answer of a reward to a group, in a loop of its own."""

    async def run():
        try:
            return await plugin.score(rows, None)
        finally:
            await plugin.run_finished(None)

    return asyncio.run(run())
