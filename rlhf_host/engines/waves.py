"""Queue before a batched generator: many awaiting callers, one batch at a time, and batches that do not depend on timing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial

from rlhf_host.engines.requests import Request, Waiting
from rlhf_host.errors import RunError
from rlhf_host.protocols import Compute
from rlhf_host.records.episodes import Generation

Finish = Callable[[Sequence[tuple[int, Generation | Exception]]], object]
"""Called with requests, by their index, as they finish or fail."""
Dropped = Callable[[], bool | set[int]]
"""Requests that nobody waits for any more; True: none matters, stop."""


class Waves:
    """Collects requests until as many wait as are expected, then runs them in the order of their keys.

    ``run(requests, finish, dropped)`` does the work on the compute thread; it splits work that is too large for one batch.
    Everything else happens on the event loop.
    """

    def __init__(self, run: Callable[[list[Request], Finish, Dropped], None], compute: Compute, max_wait_s: float):
        self._run, self._compute, self._max_wait_s = run, compute, max_wait_s
        self._waiting: list[Waiting] = []
        self._running: list[Waiting] = []
        self._cancelled: set[int] = set()
        """Requests of the running wave that nobody waits for any more, by their index."""
        self._news = asyncio.Event()
        self._news_at = 0.0
        self._expected = 0
        self._closed = False
        self._server: asyncio.Task[None] | None = None

    def expect(self, count: int) -> None:
        self._expected, self._news_at = count, time.monotonic()
        self._news.set()

    async def submit(self, request: Request) -> Generation:
        if self._closed:
            raise RunError("the engine is closed")
        call = Waiting(request, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        self._news_at = time.monotonic()
        self._news.set()
        if self._server is None or self._server.done():
            self._news = asyncio.Event()  # an event belongs to one loop, and a test may use several
            self._server = asyncio.create_task(self._serve(), name="rlhf-waves")
        try:
            return await call.future
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(call)

    async def close(self) -> None:
        """Fails pending requests, and waits until the running batch has noticed."""
        self._closed = True
        for call in self._waiting + self._running:
            _reject(call, RunError("the engine was closed while requests were pending"))
        self._waiting.clear()
        self._news.set()
        if self._server is not None:
            await asyncio.wait([self._server])

    async def _serve(self) -> None:
        """Runs waves until nobody waits."""
        while self._waiting:
            await self._wait_for_requests()
            if self._closed:
                return
            calls = self._running = sorted(self._waiting, key=lambda call: (call.request.key, call.request.token_ids))
            self._waiting, self._cancelled = [], set()
            for index, call in enumerate(calls):
                call.future.add_done_callback(partial(self._over, index))
            deliver: Finish = partial(asyncio.get_running_loop().call_soon_threadsafe, _resolve, calls)  # type: ignore[arg-type]
            work = partial(self._run, [call.request for call in calls], deliver, self._dropped)
            try:
                await asyncio.wrap_future(self._compute.submit(work))
            except Exception as error:
                for call in calls:
                    _reject(call, error)
            self._running = []
            self._news_at = time.monotonic()

    async def _wait_for_requests(self) -> None:
        """Waits for as many requests as are expected, or until none has come for a while."""
        while not self._closed:
            self._news.clear()
            await asyncio.sleep(0)  # tasks that were started together submit in one turn of the loop
            patience = self._news_at + self._max_wait_s - time.monotonic()
            if not self._news.is_set() and (len(self._waiting) >= self._expected or patience <= 0):
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), patience)

    def _over(self, index: int, future: asyncio.Future[Generation]) -> None:
        if future.cancelled():
            self._cancelled.add(index)

    def _dropped(self) -> bool | set[int]:
        return self._closed or self._cancelled.copy()


def _resolve(calls: Sequence[Waiting], finished: Sequence[tuple[int, Generation | Exception]]) -> None:
    for index, answer in finished:
        if isinstance(answer, Exception):
            _reject(calls[index], answer)
        elif not calls[index].future.done():
            calls[index].future.set_result(answer)


def _reject(call: Waiting, error: Exception) -> None:
    if not call.future.done():
        call.future.set_exception(error)
