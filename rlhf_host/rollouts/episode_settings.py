"""Settings of episodes: those of a split, and the model that answers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from rlhf_host.config.schema import DataConfig, RolloutConfig
from rlhf_host.records.episodes import Sampling
from rlhf_host.rollouts.gate import Gate

MOST_TOKENS = 1 << 31
"""Assumed vocabulary size if the size is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSettings:
    """Settings that all episodes of a split share."""

    sampling: Sampling
    max_tokens: int
    """Longest trajectory, prompt included."""
    data: DataConfig = field(default_factory=DataConfig)
    """Chat template and system prompt."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Retries and deadlines, history and format of tool calls."""
    strict: bool = False
    """If True, any exception of an agent ends the run at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledModel:
    """Model that answers in episodes: its engine, and the meaning of its tokens."""

    engine: Gate
    tokenizer: Any
    engine_name: str = "the engine"
    stop_ids: Collection[int] = ()
    """Tokens that end an answer, beside the tokenizer's end of sequence."""
    vocabulary: int = MOST_TOKENS
    """Tokens of the model, which may be more than its tokenizer has."""
    texts: int = MOST_TOKENS
    """Tokens of the tokenizer: larger ids of the model have no text."""
    images: bool = False
    """True if the engine takes prompts with pictures."""
