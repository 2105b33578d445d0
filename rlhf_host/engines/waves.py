"""The queue before a batched generator: many awaiting callers, one decoding thread, batches that never depend on timing."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from rlhf_host.engines.protocol import Request
from rlhf_host.errors import RunError
from rlhf_host.records.episodes import Generation

Finish = Callable[[Sequence[tuple[int, Generation]]], None]
"""Told of requests, by their index, as they finish."""
Dropped = Callable[[], bool | set[int]]
"""Which requests nobody waits for any more; ``True``: none matters, stop."""


@dataclass(eq=False, slots=True)
class _Call:
    request: Request
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Generation] = field(init=False)

    def __post_init__(self) -> None:
        self.future = self.loop.create_future()


class Waves:
    """Collects requests until as many wait as may come, then runs them in the order of their keys.

    ``run(requests, finish, dropped)`` does the work in this object's one thread; it splits what is too much for one batch.
    """

    def __init__(self, run: Callable[[list[Request], Finish, Dropped], None], max_wait_s: float):
        self._run, self._max_wait_s = run, max_wait_s
        self.execute: Callable[[Callable[[], None]], None] | None = None
        self._condition = threading.Condition()
        self._waiting: list[_Call] = []
        self._running: list[_Call] = []
        self._cancelled = False
        """Whether a caller has gone since the running wave began; asked before every token."""
        self._settled = False
        self._settling = False
        self._news = 0.0
        self._expected = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def expect(self, count: int) -> None:
        with self._condition:
            self._expected = count
            self._news = time.monotonic()
            if self._waiting:  # every wake-up of the other thread costs this one the interpreter
                self._condition.notify()

    async def submit(self, request: Request) -> Generation:
        return (await self.submit_all([request]))[0]

    async def submit_all(self, requests: Sequence[Request]) -> list[Generation]:
        """Queue all requests at once and wait for all."""
        loop = asyncio.get_running_loop()
        calls = [_Call(request, loop) for request in requests]
        with self._condition:
            if self._closed:
                raise RunError("the engine is closed")
            self._waiting += calls
            self._news = time.monotonic()
            self._settled = False
            first, self._settling = not self._settling, True
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="rlhf-engine", daemon=True)
                self._thread.start()
        # Tasks that were started together all submit in one turn of the loop: only then is the queue looked at.
        if first:
            loop.call_soon(self._settle)
        try:
            return [await call.future for call in calls]
        except BaseException:
            self._forget(calls)
            raise

    def _forget(self, calls: Sequence[_Call]) -> None:
        """Nobody waits for these any more."""
        with self._condition:
            self._cancelled = True
            for call in calls:
                if not call.future.done():
                    call.future.cancel()
                elif not call.future.cancelled():
                    call.future.exception()  # seen, so asyncio does not complain of it
                with contextlib.suppress(ValueError):
                    self._waiting.remove(call)

    def _settle(self) -> None:
        with self._condition:
            self._settled = True
            self._settling = False
            self._condition.notify()

    async def close(self) -> None:
        with self._condition:
            self._closed = True
            calls = self._waiting + self._running
            self._waiting = []
            self._condition.notify()
        self._fail(calls, RunError("the engine was closed while requests were pending"))
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _patience(self) -> float | None:
        """Seconds until the waiting requests may start; ``None``: no telling, wait for news."""
        if not self._waiting or not self._settled:
            return None
        if len(self._waiting) >= self._expected:
            return 0.0
        return max(0.0, self._news + self._max_wait_s - time.monotonic())

    def _work(self) -> None:
        while True:
            with self._condition:
                while not self._closed and (patience := self._patience()) != 0.0:
                    self._condition.wait(patience)
                if self._closed:
                    return
                calls = self._running = sorted(self._waiting, key=lambda call: (call.request.key, call.request.token_ids))
                self._waiting = []
                self._cancelled = any(call.future.cancelled() for call in calls)
            try:
                self._compute(
                    partial(
                        self._run,
                        [call.request for call in calls],
                        partial(self._deliver, calls),
                        partial(self._dropped, calls),
                    )
                )
            except BaseException as error:  # whatever it was, the callers must hear of it
                with self._condition:
                    calls, self._waiting = calls + self._waiting, []
                self._fail(calls, error)
            with self._condition:
                self._running = []
                self._news = time.monotonic()

    def _compute(self, work: Callable[[], None]) -> None:
        if self.execute is None:
            work()
        else:
            self.execute(work)

    def _dropped(self, calls: list[_Call]) -> bool | set[int]:
        if not self._cancelled:
            return self._closed or set()
        return self._closed or {index for index, call in enumerate(calls) if call.future.cancelled()}

    def _deliver(self, calls: list[_Call], finished: Sequence[tuple[int, Generation]]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Generation], Generation]]] = {}
        for index, generation in finished:
            by_loop.setdefault(calls[index].loop, []).append((calls[index].future, generation))
        for loop, results in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the caller's loop is gone
                loop.call_soon_threadsafe(_resolve, results)

    def _fail(self, calls: Sequence[_Call], error: BaseException) -> None:
        for call in calls:
            with contextlib.suppress(RuntimeError):
                call.loop.call_soon_threadsafe(_reject, call.future, error)


def _resolve(results: list[tuple[asyncio.Future[Generation], Generation]]) -> None:
    for future, generation in results:
        if not future.done():
            future.set_result(generation)


def _reject(future: asyncio.Future[Generation], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
