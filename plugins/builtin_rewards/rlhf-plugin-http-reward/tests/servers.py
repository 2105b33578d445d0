"""A reward server that does what a test tells it."""

import asyncio
import threading

from aiohttp import web


class Server:
    """``answer(body, number)`` gives what is answered: an object, text with a status and perhaps headers, or a time to wait
    before. What is asked with GET gets the reward 9."""

    def __init__(self, answer):
        self.answer, self.asked, self.headers = answer, [], []
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
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/get_reward", self._get)
        app.router.add_get("/{any}", self._page)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return "http://{}:{}/get_reward".format(*self._runner.addresses[0])

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
