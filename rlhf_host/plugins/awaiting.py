"""Answers of plugins' functions that must be awaited, many at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any


async def await_all(awaitables: Iterable[Awaitable[Any]]) -> list[Any]:
    """Return all results. ``sys.exit`` in one is an error like others: of a task it would end the event loop, whoever it serves."""
    return await asyncio.gather(*map(_guarded, awaitables))


async def _guarded(one: Awaitable[Any]) -> Any:
    try:
        return await one
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error}") from error
