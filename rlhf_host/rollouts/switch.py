"""Answers that wait for new weights in their midst, at places that the clock does not choose."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rlhf_host.records.episodes import Generation, SampleKey, Sampling
from rlhf_host.rollouts.gate import Answering

Answers = dict[int, dict[SampleKey, Generation]]
"""Seed of a draw → what its episodes were answered, in parts."""


class Switch:
    """Asks an engine for ``tokens`` at a time. After each part an answer waits until ``release``, and goes on with keys and values
    of the weights that the engine has then. An answer with stop strings, which may lie across a cut, is one part.

    ``look`` is called when something may have come to rest.
    """

    def __init__(self, engine: Answering, tokens: int):
        self.engine, self.tokens = engine, tokens
        self.look: Callable[[], None] = lambda: None
        self.asking = 0
        """Requests that are with the engine."""
        self._expected = 0
        self._waiting = Counter[tuple[int, int]]()
        """Seed and sample of an episode → how many of its answers wait."""
        self._opened = asyncio.Event()
        """Set, and replaced, when they go on."""
        self._said: Answers = {}
        self._begun: Answers = {}
        """As they were when the weights changed: what a resumed run goes on from."""

    @property
    def waiting(self) -> int:
        """Episodes that wait."""
        return len(self._waiting)

    def expect(self, count: int) -> None:
        self._expected = count
        self._tell()
        self.look()

    def _tell(self) -> None:
        self.engine.expect(self._expected - self.waiting)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        known = self._begun.get(key[0], {}).get(key)
        part = known if known is not None else await self._part(token_ids, sampling, key)
        self._said.setdefault(key[0], {})[key] = part
        left = sampling.max_new_tokens - len(part.token_ids)
        if part.finish_reason != "length" or not left:
            return part
        if known is None:
            await self._wait((key[0], key[1]))
        more = replace(sampling, max_new_tokens=left)
        rest = await self.generate([*token_ids, *part.token_ids], more, (*key, len(part.token_ids)))
        return Generation(
            [*part.token_ids, *rest.token_ids],
            [*part.logprobs, *rest.logprobs],
            [*part.versions, *rest.versions],
            rest.finish_reason,
        )

    async def _part(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        if not sampling.stop:
            sampling = replace(sampling, max_new_tokens=min(self.tokens, sampling.max_new_tokens))
        self.asking += 1
        try:
            return await self.engine.generate(token_ids, sampling, key)
        finally:
            self.asking -= 1

    async def _wait(self, episode: tuple[int, int]) -> None:
        opened = self._opened
        self._waiting[episode] += 1
        self._tell()
        self.look()
        try:
            await opened.wait()
        finally:
            if not opened.is_set():  # it was cancelled
                self._waiting -= Counter([episode])

    def release(self) -> None:
        """Those who wait go on."""
        self._waiting.clear()
        self._opened.set()
        self._opened = asyncio.Event()
        self._tell()

    def renew(self) -> None:
        """The weights have changed, with nothing under way: note what the draws that wait were answered, and go on."""
        if self._said:  # a run that was resumed goes on from what it has noted
            self._said = {seed: self._said[seed] for seed, _ in self._waiting}
            self._begun = {seed: dict(parts) for seed, parts in self._said.items()}
        self.release()

    def state_dict(self) -> list[list[Any]]:
        """The noted answers."""
        return [
            [list(key), *map(list, (part.token_ids, part.logprobs, part.versions)), part.finish_reason]
            for parts in self._begun.values()
            for key, part in parts.items()
        ]

    def load_state_dict(self, state: Sequence[Sequence[Any]]) -> None:
        for key, token_ids, logprobs, versions, reason in state:
            self._begun.setdefault(key[0], {})[tuple(key)] = Generation(token_ids, logprobs, versions, reason)
