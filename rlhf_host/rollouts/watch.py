"""Rollouts in which nothing moves: told, and ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, TypeVar

from rlhf_host.errors import RunError

T = TypeVar("T")

log = logging.getLogger(__name__)

SAY_S = 60.0
"""So often it is told."""
LOOKS = 12
"""In this time."""


async def watched(work: Coroutine[Any, Any, T], moved: Callable[[], Hashable], waiting: Callable[[], str], stall_s: float) -> T:
    """What ``work`` gives.

    Args:
        moved: gives something else whenever anything is done.
        waiting: what is not done, for people.
        stall_s: nothing may be done for so long; 0: no limit.

    Raises:
        RunError: nothing was.
    """
    loop = asyncio.get_running_loop()
    last, since, said, problem = moved(), loop.time(), 0.0, ""
    period = min(SAY_S, stall_s or SAY_S) / LOOKS
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal last, since, said, problem, timer
        still = loop.time() - since
        if (now := moved()) != last:
            last, since, said = now, loop.time(), 0.0
        elif stall_s and still >= stall_s:
            problem = f"nothing has moved in the rollout for {still:.0f} s (rollout.stall_s {stall_s:g}): {waiting()}"
            deadline.reschedule(loop.time())
            return
        elif still - said >= SAY_S:
            said = still
            log.warning("nothing has moved in the rollout for %.0f s: %s", still, waiting())
        timer = loop.call_later(period, look)

    timer = loop.call_later(period, look)
    try:
        async with asyncio.timeout(None) as deadline:
            return await work
    except TimeoutError:
        if not problem:
            raise
        raise RunError(problem) from None
    finally:
        timer.cancel()
