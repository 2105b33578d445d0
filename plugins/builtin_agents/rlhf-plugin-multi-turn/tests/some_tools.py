"""Tools that do what tools do."""

import asyncio
import time

from rlhf_host import EpisodeFailed

STARTED = []


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
    STARTED.append(s)
    await asyncio.sleep(s)
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
