"""An event loop in which nobody sleeps: time jumps to the next timer. Where there is none and nothing is ready, nothing will ever
happen again, and that is known at once."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from unittest.mock import patch

T = TypeVar("T")

MOST = 200_000
"""Turns of the loop, after which whatever runs goes round in circles."""


class Hang(Exception):
    """Nothing is ready and no timer is pending, or turns of the loop lead nowhere."""


class _Jumping(selectors.DefaultSelector):
    now = 0.0
    turns = 0
    on_hang: Callable[[], object] = staticmethod(lambda: None)
    """Called once."""

    def select(self, timeout: float | None = None) -> list[Any]:
        self.turns += 1
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0 and self.turns < MOST):
            return ready
        if timeout is None or self.turns >= MOST:
            on_hang, self.on_hang, self.turns = self.on_hang, self._raise, 0
            on_hang()
        else:
            self.now += timeout
        return []

    def _raise(self) -> None:
        raise Hang("also while it was cancelled")


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, selector: _Jumping):
        self.jumping = selector
        super().__init__(selector)

    def time(self) -> float:
        return self.jumping.now


async def _at_once(function: Callable[..., T], *arguments: Any) -> T:
    """In the place of ``asyncio.to_thread``: time would jump while a thread works."""
    return function(*arguments)


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """What ``work()`` gives, on a loop of its own whose time everybody sees. Raises ``Hang``."""
    selector, hung = _Jumping(), []

    async def guarded() -> T:
        task = asyncio.current_task()
        assert task is not None
        selector.on_hang = lambda: (hung.append(True), task.cancel())
        return await work()

    clock, threads = patch.object(time, "monotonic", lambda: selector.now), patch.object(asyncio, "to_thread", _at_once)
    with clock, threads, asyncio.Runner(loop_factory=lambda: _Loop(selector)) as runner:
        try:
            return runner.run(guarded())
        except asyncio.CancelledError:
            if hung:
                raise Hang(f"nothing is ready and no timer is pending, at {selector.now:.3f} s") from None
            raise
