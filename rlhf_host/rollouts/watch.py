"""Watching of slow rollouts: their progress is logged, and a rollout in which nothing progresses is ended."""

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
"""Seconds between two warnings that nothing progresses."""
LOOKS = 12
"""Number of checks in this time."""
TURNS = 100
"""Turns of the event loop. If nothing works for so many turns, nothing will ever progress: everything that could go on has done
so.
"""


async def watched(
    work: Coroutine[Any, Any, T],
    moved: Callable[[], Hashable],
    waiting: Callable[[], str],
    stall_s: float,
    at_work: Callable[[], bool] = lambda: True,
    progress: Callable[[], str] | None = None,
    tell_s: float = SAY_S,
) -> T:
    """Returns the result of ``work``.

    Args:
        moved: returns a different value whenever there was progress.
        waiting: unfinished work, for people.
        stall_s: maximum seconds without progress; 0: no limit.
        at_work: returns True if something outside of the event loop is working, such as an engine or a plugin.
        progress: returns the progress, for people; logged every ``tell_s`` seconds while there is some.

    Raises:
        RunError: there was no progress for too long, or no progress is possible.
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
            problem = f"the rollout cannot go on: {waiting()}. This is a bug in rlhf-host: please report it"
            deadline.reschedule(now)
            return
        elif stall_s and still >= stall_s:
            problem = f"no progress in the rollout for {still:.0f} s (rollout.stall_s {stall_s:g}): {waiting()}"
            deadline.reschedule(now)
            return
        elif still - said >= SAY_S:
            said = still
            log.warning("no progress in the rollout for %.0f s: %s", still, waiting())
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
