"""Barriers for work on the event loop: requests wait while weights change, scoring waits while states are saved."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from rlhf_host.protocols import Counting, Generator
from rlhf_host.records.episodes import Generation, SampleKey, Sampling
from rlhf_host.spans import span


class Barrier:
    """A barrier that lets work pass until it is closed."""

    def __init__(self) -> None:
        self.closed, self.in_flight, self.held = False, 0, 0
        self._opened, self._idle = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Marks work that closing waits for."""
        while self.closed:
            self.held += 1
            try:
                await self._opened.wait()
            finally:
                self.held -= 1
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    def close(self) -> None:
        """Closes the barrier to new work."""
        self.closed = True
        self._opened.clear()

    async def hold(self) -> None:
        """Closes the barrier and waits until work under way is finished."""
        self.close()
        while self.in_flight:
            self._idle.clear()
            await self._idle.wait()

    def release(self) -> None:
        self.closed = False
        self._opened.set()


class Gate(Barrier):
    """Gate for the requests of episodes to an engine. Episodes go on while it is closed; their next request waits.

    Args:
        weights: the gate of another engine whose weights this one samples from too: its requests pass there.
    """

    def __init__(self, engine: Generator, weights: Barrier | None = None):
        super().__init__()
        self.engine, self._weights = engine, weights or self
        self.expected = 0

    @property
    def sampled(self) -> int:
        """Number of tokens that the engine has sampled; 0 if it does not count them."""
        return self.engine.sampled if isinstance(self.engine, Counting) else 0

    def expect(self, more: int) -> None:
        """Announces how many more requests than before may come soon."""
        self.expected += more
        if not self.closed:
            self.engine.expect(self.expected)

    def close(self) -> None:
        super().close()
        self.engine.expect(0)  # those who wait at the gate will not come

    def release(self) -> None:
        super().release()
        self.expect(0)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        async with self._weights.passing():
            with span("request"):
                return await self.engine.generate(token_ids, sampling, key)
