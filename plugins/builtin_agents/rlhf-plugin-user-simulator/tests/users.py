"""A server of OpenAI's API that plays the user a test wants, and a policy that says its words in turn."""

from aiohttp import web
from rlhf_authoring.served import Served

from rlhf_host import Reply, Segment, Task, Trajectory


class User(Served):
    """``say(messages, number)`` gives the user's words, or a status that is none of success."""

    path = "/v1"

    def __init__(self, say):
        self.say, self.asked = say, []

    def routes(self):
        return [web.post("/v1/chat/completions", self._chat), web.get("/v1/models", self._models)]

    async def _models(self, request):
        return web.json_response({"object": "list", "data": []})

    async def _chat(self, request):
        body = await request.json()
        self.asked.append(body)
        said = self.say(body["messages"], len(self.asked))
        if isinstance(said, int):
            return web.json_response({"error": {"message": "no"}}, status=said, headers={"retry-after-ms": "5"})
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        return web.json_response({**answer, "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}})


class Assistant:
    """A policy."""

    def __init__(self, *words):
        self.words, self.talks, self.talk_of_user = list(words), [], []

    def role(self, name):
        self.user = Assistant(*self.talk_of_user)
        return self.user

    async def chat(self, messages, max_new_tokens=None):
        said = self.words.pop(0)
        if isinstance(said, Exception):
            raise said
        self.talks.append([dict(message) for message in messages])
        return Reply(said)

    def trajectories(self):
        segments = [Segment("prompt", [0]), *(Segment("action", [1]) for _ in self.talks)]
        return [Trajectory("e", "g", Task("q"), segments)]
