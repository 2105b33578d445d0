"""What episodes are played with: the settings of a split, and the model that answers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from rlhf_host.config.schema import DataConfig, RolloutConfig
from rlhf_host.records.episodes import NoRoom, Sampling
from rlhf_host.rollouts.gate import Gate

MOST_TOKENS = 1 << 31
"""Of a vocabulary whose size is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSettings:
    """The settings that all episodes of a split share."""

    sampling: Sampling
    max_tokens: int
    """Longest trajectory, prompt included."""
    data: DataConfig = field(default_factory=DataConfig)
    """Its template and system prompt."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Its retries and deadlines, its history and its format of tool calls."""
    strict: bool = False
    """Whatever an agent raises ends the run at once."""

    def fitting(self, length: int) -> Sampling:
        """The sampling for a turn after ``length`` tokens."""
        room = self.max_tokens - length
        if room <= 0:
            raise NoRoom(f"the prompt has {length} tokens; no room is left of max_tokens {self.max_tokens}")
        sampling = self.sampling
        return sampling if room >= sampling.max_new_tokens else replace(sampling, max_new_tokens=room)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledModel:
    """The model that answers in episodes: its engine, and what its tokens mean."""

    engine: Gate
    tokenizer: Any
    engine_name: str = "the engine"
    stop_ids: Collection[int] = ()
    """Tokens that end an answer, beside the tokenizer's end of sequence."""
    vocabulary: int = MOST_TOKENS
    """The model's, which may have more tokens than its tokenizer."""
