"""Rollouts that take long: how far they are is told, and those in which nothing moves are ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, TypeVar

from rlhf_host.errors import RunError
from rlhf_host.phases import phase

T = TypeVar("T")

log = logging.getLogger(__name__)

SAY_S = 60.0
"""So often it is told that nothing moves."""
LOOKS = 12
"""In this time."""
TURNS = 100
"""Of the event loop. Where nothing is at work for so long, nothing will ever move: whatever could go on has done so."""


async def watched(
    work: Coroutine[Any, Any, T],
    moved: Callable[[], Hashable],
    waiting: Callable[[], str],
    stall_s: float,
    at_work: Callable[[], bool] = lambda: True,
    progress: Callable[[], str] | None = None,
    tell_s: float = SAY_S,
) -> T:
    """What ``work`` gives.

    Args:
        moved: gives something else whenever anything is done.
        waiting: what is not done, for people.
        stall_s: nothing may be done for so long; 0: no limit.
        at_work: whether something outside of the event loop is, an engine or a plugin, so that something may move.
        progress: how far it is, for people, told every ``tell_s`` while something moves.

    Raises:
        RunError: nothing was, or nothing ever will be.
    """
    loop = asyncio.get_running_loop()
    last, since, said, problem = moved(), loop.time(), 0.0, ""
    told, blaming = since, last
    period, idle = min(SAY_S, stall_s or SAY_S, tell_s * LOOKS) / LOOKS, 0
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal last, since, said, told, blaming, problem, timer, idle
        now, done = loop.time(), moved()
        still = now - since
        idle = 0 if at_work() else idle + 1
        if progress is not None and now - told >= tell_s and done != blaming:
            told, blaming = now, done
            phase(progress())
        if done != last:
            last, since, said, idle = done, now, 0.0, 0
        elif idle > TURNS:
            problem = f"the rollout would wait for ever: {waiting()}. This is a mistake of rlhf-host: please report it"
            deadline.reschedule(now)
            return
        elif stall_s and still >= stall_s:
            problem = f"nothing has moved in the rollout for {still:.0f} s (rollout.stall_s {stall_s:g}): {waiting()}"
            deadline.reschedule(now)
            return
        elif still - said >= SAY_S:
            said = still
            log.warning("nothing has moved in the rollout for %.0f s: %s", still, waiting())
        timer = loop.call_later(0.0 if idle else period, look)

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
