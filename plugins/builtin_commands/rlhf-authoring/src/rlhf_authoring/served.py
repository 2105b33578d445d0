"""A small web server in a thread of its own, for tests of what asks servers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from typing import Self

from aiohttp import web


class Served:
    """A context with a server at ``url``, on a free port of this machine. Subclasses give ``routes``.

    Attributes:
        path: what ``url`` has behind the address.
    """

    path = ""
    url: str

    def routes(self) -> Iterable[web.AbstractRouteDef]:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10) + self.path
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _start(self) -> str:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_routes(self.routes())
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0]
        return f"http://{host}:{port}"
