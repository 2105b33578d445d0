"""What an engine is: it takes tokens and answers tokens, with the log-probability and version of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rlhf_host.records.episodes import Generation, SampleKey, Sampling

NO_WEIGHTS = -1
"""The version of an engine that has no weights of the run yet."""


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to sample. ``key`` fixes its uniforms, whatever else is in the batch."""

    token_ids: tuple[int, ...]
    sampling: Sampling
    key: SampleKey


class Engine(Protocol):
    """Generates completions under one weight version at a time."""

    version: int

    def expect(self, count: int) -> None:
        """``count`` episodes may still submit: a wave starts when that many requests wait."""
        ...

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        """Sample one completion of ``token_ids``. Raises ``UserError`` for a prompt that cannot be served."""
        ...

    # An engine may take whole groups, which spares the host a task for every episode:
    # async def generate_group(self, token_ids, sampling, keys: Sequence[SampleKey]) -> list[Generation]
    # What it gives for each key is what ``generate`` would.

    def set_version(self, version: int) -> None:
        """The weights now held are ``version``; tokens sampled from here on carry it."""
        ...

    async def close(self) -> None:
        """Fail what is pending and release threads."""
        ...
