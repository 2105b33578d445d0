"""A thread that does the work of one model: requests in their order, and samples between them, as many at once as fit together."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from rlhf_host import RunError
from rlhf_tinker.sampling import Answer, Ask

GONE = "the model was unloaded, or the server ends"
MOST = 256
"""Answers that are drawn at once, where requests allow it."""


class Worker:
    """Runs work one after the other on a thread of its own.

    Args:
        draw: answers requests for samples, all with the same settings.
    """

    def __init__(self, name: str, draw: Callable[[list[Ask]], Sequence[list[Answer] | None]]):
        self._draw = draw
        self._turn = threading.Condition()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any] | Ask]] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Any] | Ask) -> asyncio.Future[Any]:
        """Returns the result of a function, or a request's answers, for the caller's event loop."""
        future: Future[Any] = Future()
        with self._turn:
            if self._closed:
                future.set_exception(RunError(GONE))
            else:
                self._waiting.append((future, work))
                self._turn.notify()
        return asyncio.wrap_future(future)

    def close(self, last: Callable[[], Any]) -> None:
        """Ends the thread after what it does now, and ``last``. What waits fails."""
        with self._turn:
            self._closed = True
            dropped, self._waiting = list(self._waiting), deque([(Future(), last)])
            self._turn.notify()
        for future, _ in dropped:
            if future.set_running_or_notify_cancel():
                future.set_exception(RunError(GONE))

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._turn:
                while not self._waiting:
                    self._turn.wait()
                future, work = self._waiting.popleft()
                last = self._closed and not self._waiting
                group = [(future, work)] + (self._alike(work) if isinstance(work, Ask) else [])
            group = [(future, work) for future, work in group if future.set_running_or_notify_cancel()]
            if isinstance(work, Ask):
                self._answer([(future, ask) for future, ask in group if isinstance(ask, Ask)])
            elif group:
                with _result_of(future):
                    future.set_result(work())
            if last:
                return

    def _alike(self, ask: Ask) -> list[tuple[Future[Any], Any]]:
        """Takes the waiting requests for samples that can be answered together with one."""
        found: list[tuple[Future[Any], Any]] = []
        count, rest = ask.count, deque[tuple[Future[Any], Any]]()
        for pair in self._waiting:
            other = pair[1]
            if isinstance(other, Ask) and ask.together is not None and other.together == ask.together and count < MOST:
                found.append(pair)
                count += other.count
            else:
                rest.append(pair)
        self._waiting = rest
        return found

    def _answer(self, group: list[tuple[Future[Any], Ask]]) -> None:
        try:
            answers = self._draw([ask for _, ask in group])
        except BaseException as error:
            for future, _ in group:
                future.set_exception(error)
            return
        for (future, _), own in zip(group, answers, strict=True):
            future.set_result(own)


@contextlib.contextmanager
def _result_of(future: Future[Any]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        future.set_exception(error)
