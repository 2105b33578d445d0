"""Threads for synchronous hooks."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class Threads:
    """A thread pool of daemons: a hook that hangs past its deadline must not keep the process from ending.

    (``ThreadPoolExecutor`` joins its threads at exit.) Threads start as they are needed, up to ``limit``.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._started = 0
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Run ``function()`` on a thread, in a copy of the caller's context."""
        future: Future[Any] = Future()
        context = contextvars.copy_context()
        self._jobs.put((future, lambda: context.run(function)))
        if not self._idle.acquire(blocking=False):
            with self._lock:
                if self._started < self._limit:
                    self._started += 1
                    threading.Thread(target=self._work, name=f"rlhf-hook-{self._started}", daemon=True).start()
        return future

    def close(self) -> None:
        """Let the threads end once they are done with what they do."""
        with self._lock:
            for _ in range(self._started):
                self._jobs.put(None)
            self._started = 0

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
            del job, future, function
            self._idle.release()
