"""Between episodes and their engine: closed while weights change."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlhf_host.protocols import Generator
from rlhf_host.records.episodes import Generation, SampleKey, Sampling


@dataclass
class Gate:
    """Requests of episodes on their way to an engine. Episodes go on while it is closed; their next request waits."""

    engine: Generator
    closed: bool = False
    in_flight: int = 0
    expected: dict[int, int] = field(default_factory=dict)
    """Who asks → how many requests may come."""

    def __post_init__(self) -> None:
        self._opened, self._idle = asyncio.Event(), asyncio.Event()

    def client(self) -> GatedEngine:
        """The engine for one split: what several expect adds up."""
        return GatedEngine(self, len(self.expected))

    def close(self) -> None:
        """Let no new request through."""
        self.closed = True
        self._opened.clear()
        self.engine.expect(0)  # those who wait at the gate will not come

    async def hold(self) -> None:
        """Close, and wait until the requests under way are answered."""
        self.close()
        while self.in_flight:
            self._idle.clear()
            await self._idle.wait()

    def release(self) -> None:
        self.closed = False
        self.tell()
        self._opened.set()

    def tell(self) -> None:
        """Tell the engine how many requests may come."""
        if not self.closed:
            self.engine.expect(sum(self.expected.values()))

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        while self.closed:
            await self._opened.wait()
        self.in_flight += 1
        try:
            return await self.engine.generate(token_ids, sampling, key)
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()


class GatedEngine:
    """What episodes ask of a ``Generator``, behind a gate."""

    def __init__(self, gate: Gate, number: int):
        self.gate, self._number = gate, number
        gate.expected[number] = 0

    def expect(self, count: int) -> None:
        self.gate.expected[self._number] = count
        self.gate.tell()

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        return await self.gate.generate(token_ids, sampling, key)
