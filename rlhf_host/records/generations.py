"""Requests to engines, and their answers. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

SUPPORT = "support"
"""Name of the tokens that could be drawn, among an answer's traces."""
FinishReason: TypeAlias = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings for drawing tokens. With ``top_k = 0``, ``top_p = 1`` and ``min_p = 0`` the distribution is not truncated."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    support: bool = False
    """Provisional: tell the tokens that could be drawn, too (``Generation.traces``). Engines can whose traits say so."""

    @property
    def truncates(self) -> bool:
        """True if some tokens of the vocabulary cannot be drawn."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


SampleKey: TypeAlias = tuple[int, ...]
"""``(seed, split, source hash, task index, epoch, sample, turn)`` or similar: fixes a request's random numbers in any batch."""


@dataclass(slots=True)
class Generation:
    """The answer of an engine: ``token_ids`` and, per token, its log-probability and the version of the weights.

    Engines may return lists. In a run they become ``Numbers``, which take little memory and compare, add and slice like lists.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish_reason: FinishReason
    traces: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """Provisional: what the engine tells of tokens beside: name → numpy array ``[P + n - 1, ...]``, of the prompt and the answer
    without its last token, which the model did not read. ``routed_experts``: ``[..., layers, k]``, those that each layer took.
    ``support``: of objects, the tokens that could be drawn next (``records/token_sets.py``), ``b""`` in the prompt.
    """
