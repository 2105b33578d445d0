"""Calls of plugins' code side by side: threads for synchronous hooks, and answers that must be awaited."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from rlhf_host.errors import RunError


class Threads:
    """A thread pool of daemons: a hook that hangs past its deadline must not keep the process from ending.

    (``ThreadPoolExecutor`` joins its threads at exit.) Threads start as they are needed, up to ``limit``.
    """

    def __init__(self, limit: int):
        self._limit = self._most = limit
        self._started = self._open = 0
        self._abandoned: list[Future[Any]] = []
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Run ``function()`` on a thread, in a copy of the caller's context."""
        future: Future[Any] = Future()
        context = contextvars.copy_context()
        self._jobs.put((future, lambda: context.run(function)))
        with self._lock:
            self._open += 1
            self._start()
        return future

    def abandon(self, job: Future[Any]) -> None:
        """Nobody waits for the job any more: it does not start, or, where it runs, another thread takes its place.

        Raises ``RunError`` when more run on than there were threads.
        """
        if job.cancel() or job.done():
            return
        with self._lock:
            self._limit += 1
            self._start()
            self._abandoned = [one for one in self._abandoned if not one.done()] + [job]
            if len(self._abandoned) > self._most:
                raise RunError(f"{len(self._abandoned)} calls of plugins still run after their deadline")

    def close(self) -> None:
        """Let the threads end once they are done with what they do."""
        with self._lock:
            for _ in range(self._started):
                self._jobs.put(None)
            self._started = 0

    def _start(self) -> None:
        """One more thread, where there are jobs that wait for one."""
        if self._started < min(self._open, self._limit):
            self._started += 1
            threading.Thread(target=self._work, name=f"rlhf-hook-{self._started}", daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except StopIteration as error:  # in asyncio's futures there is no room for it: who awaits it would wait forever
                    future.set_exception(RuntimeError(f"StopIteration: {error}").with_traceback(error.__traceback__))
                except BaseException as error:
                    future.set_exception(error)
            del job, future, function
            with self._lock:
                self._open -= 1


def then(value: Any, go_on: Callable[[Any], Any]) -> Any:
    """Returns ``go_on(value)``; where the value must be awaited, what gives that when it is awaited."""

    async def later() -> Any:
        return go_on(await value)

    return later() if inspect.isawaitable(value) else go_on(value)


def together(values: Sequence[Any]) -> Any:
    """Returns the values; where some must be awaited, what gives them when it is awaited, side by side. What one raises is its
    value.
    """

    async def result(value: Any) -> Any:
        try:
            return (await value) if inspect.isawaitable(value) else value
        except BaseException as error:  # some, of a task, would end the event loop, whoever it serves
            return error

    async def results() -> list[Any]:
        return await asyncio.gather(*map(result, values))

    return results() if any(map(inspect.isawaitable, values)) else values
