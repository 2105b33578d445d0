"""A reward server that does what a test tells it."""

import asyncio

from aiohttp import web
from rlhf_authoring.served import Served


class Server(Served):
    """``answer(body, number)`` gives what is answered: an object, text with a status and perhaps headers, or a time to wait
    before. What is asked with GET gets the reward 9."""

    path = "/get_reward"

    def __init__(self, answer):
        self.answer, self.asked, self.headers = answer, [], []
        self.open = self.most = 0

    def routes(self):
        return [web.post("/get_reward", self._get), web.get("/{any}", self._page)]

    async def _page(self, request):
        return web.json_response({"rewards": [9.0]})

    async def _get(self, request):
        body = await request.json()
        self.asked.append(body)
        self.headers.append(dict(request.headers))
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await asyncio.sleep(0.02)
            answer = self.answer(body, len(self.asked))
            if isinstance(answer, float):
                await asyncio.sleep(answer)
                answer = {"rewards": [0.0] * len(body["query"])}
            if isinstance(answer, tuple):
                return web.Response(status=answer[0], text=answer[1], headers=dict(answer[2:]))
            return web.Response(text=answer) if isinstance(answer, str) else web.json_response(answer)
        finally:
            self.open -= 1
