"""Work in threads that may be left behind: a game that hangs delays neither its episode nor the end of the run."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

STOPS_S = 1.0
"""Seconds for a thread to end after it was stopped."""


class _Stopped(BaseException):
    """Raised in the thread of a game that hangs."""


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Returns or raises what the function does. If cancelled, it is left behind."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not answer.done():
            answer.set_result(value) if error is None else answer.set_exception(error)

    def work() -> None:
        value, raised = _outcome(function, *arguments)
        with contextlib.suppress(RuntimeError):  # so late that the run is over
            loop.call_soon_threadsafe(settle, value, raised)

    threading.Thread(target=work, daemon=True, name="rlhf-game").start()
    return await answer


def limited(function: Callable[[], T], timeout_s: float) -> T:
    """Returns or raises what the function does. Raises ``TimeoutError`` if it takes too long; its thread is then stopped."""
    outcome: list[tuple[Any, BaseException | None]] = []
    thread = threading.Thread(target=lambda: outcome.append(_outcome(function)), daemon=True, name="rlhf-game-move")
    thread.start()
    try:
        thread.join(timeout_s)
    finally:  # also when Ctrl-C ends the wait
        if thread.is_alive():
            # Python code ends at this; a thread inside C code goes on, and the process can end without it.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Stopped))
            thread.join(STOPS_S)
    if not outcome or isinstance(outcome[0][1], _Stopped):
        raise TimeoutError
    value, raised = outcome[0]
    if raised is not None:
        raise raised
    result: T = value
    return result


def _outcome(function: Callable[..., Any], *arguments: Any) -> tuple[Any, BaseException | None]:
    try:
        return function(*arguments), None
    except (Exception, SystemExit, _Stopped) as error:
        # No future takes a StopIteration, and a game that exits is no end of the run.
        odd = isinstance(error, StopIteration | SystemExit)
        return None, RuntimeError(f"{type(error).__name__}: {error}") if odd else error
