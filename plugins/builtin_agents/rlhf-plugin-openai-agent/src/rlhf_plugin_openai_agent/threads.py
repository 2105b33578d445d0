"""A thread for each call, which may outlive its deadline without delaying the end of the run."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns or raises what the function does. If cancelled, it is left behind."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not answer.done():
            answer.set_result(value) if error is None else answer.set_exception(error)

    def work() -> None:
        value: Any = None
        raised: BaseException | None = None
        try:
            value = function(*arguments)
        except (Exception, SystemExit) as error:
            # No future takes a StopIteration, and a program that exits is no end of the run.
            odd = isinstance(error, StopIteration | SystemExit)
            raised = RuntimeError(f"{type(error).__name__}: {error}") if odd else error
        with contextlib.suppress(RuntimeError):  # so late that the run is over
            loop.call_soon_threadsafe(settle, value, raised)

    threading.Thread(target=work, daemon=True, name="rlhf-call").start()
    return await answer
