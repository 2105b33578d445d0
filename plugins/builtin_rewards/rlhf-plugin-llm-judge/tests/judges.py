"""A server of OpenAI's API that says what a test tells it."""

import asyncio
import threading

from aiohttp import web


class Raw(str):
    """Not JSON, though it says so."""


class Judge:
    """``say(text, number)`` gives the words, a status, a time to wait before, or a whole answer: ``Raw`` text or a JSON value."""

    def __init__(self, say, key=None, models=None):
        self.say, self.key, self.models, self.asked = say, key, models, []
        self.open = self.most = 0

    def __enter__(self):
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *_):
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _start(self):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return "http://{}:{}/v1".format(*self._runner.addresses[0])

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
            await asyncio.sleep(0.01)
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
            return web.json_response({"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})
        finally:
            self.open -= 1
