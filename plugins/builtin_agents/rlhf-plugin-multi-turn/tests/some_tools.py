"""Tools that do what tools do."""

import asyncio
import time

from rlhf_host import EpisodeFailed

EVENTS = []
"""Beginnings and ends of ``slow``."""


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def slow(s: float) -> str:
    """Waits.

    Args:
        s: Seconds.
    """
    EVENTS.append("begins")
    await asyncio.sleep(s)
    EVENTS.append("ends")
    return f"{s:g}"


def hang(s: float) -> str:
    """Waits in a thread.

    Args:
        s: Seconds.
    """
    time.sleep(s)
    return "done"


def fail(text: str) -> str:
    """Fails.

    Args:
        text: How.
    """
    raise ValueError(text)


def gone() -> str:
    """Cannot go on."""
    raise EpisodeFailed("the machine is gone")


def long() -> str:
    """Says much."""
    return "a" * 600 + "b" * 600


def _private() -> None:
    raise AssertionError
