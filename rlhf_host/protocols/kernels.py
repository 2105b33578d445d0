"""Kernels, as the host sees them: the computation of a model once more, faster on one kind of device or model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from rlhf_host.protocols.common import Traits


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What a twin is for."""

    purpose: Literal["train", "sample"]
    device: torch.device
    dtype: torch.dtype
    autocast: torch.dtype | None
    """Precision of matrix products, where another than ``dtype``."""
    even_passes: bool = False
    """Gradients must come in the same order on every rank (``BackendTraits.even_passes``)."""


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Which rows of prompt and completion a line of distinct prompts and all completions stands for (``models/layouts.py``).

    Given to every module of a decoder as the keyword ``shared_rows``, beside ``input_ids`` ``[1, N]``, restarting
    ``position_ids`` and an ``attention_mask`` of one element that means nothing. Only attention needs it: every token of a row sees
    the tokens of its row up to itself.
    """

    count: int
    """Rows, ``B``."""
    length: int
    """Of the longest row, ``L``."""
    gather: Tensor
    """``[B·L]`` int64: the line's token at every place of the padded rows; 0 at padding."""
    back: Tensor
    """``[N]`` int64: a place of the padded rows for every token of the line."""
    prompts: Sequence[int]
    """The length of every distinct prompt, in the order of the line."""
    lengths: Sequence[int]
    """Per row, how many tokens follow its prompt."""
    owners: Sequence[int]
    """Per row, the index of its prompt."""


class Decoder(Protocol):
    """Samples one batch after another, on the compute thread, in inference mode."""

    ragged: bool
    """Prompts of different lengths may be in one batch."""

    def refresh(self) -> None:
        """The weights changed in place: derive again what was derived from them. Also called between two steps of a batch."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Begin a batch. Logits ``[G, V]`` of what follows each of ``G`` distinct prompts."""

    def start(self, prompt_of_row: Tensor, longest: int) -> None:
        """Rows ``[B]`` int64, sorted by prompt, that go on by at most ``longest`` tokens each."""

    def step(self, tokens: Tensor) -> Tensor:
        """Append ``tokens`` ``[B]`` int64; logits ``[B, V]`` of what follows."""

    def keep(self, rows: Tensor) -> None:
        """Only these rows (sorted) go on."""


class KernelsPlugin(Protocol):
    """An entry point of the group ``rlhf.kernels``: the same computation, faster on one kind of device or model."""

    @property
    def traits(self) -> Traits:
        """May depend on the options."""

    def unsuited(self, model: nn.Module, use: Use) -> str | None:
        """Why it is not for this model and use, in a few words; ``None``: try it. Computes nothing."""

    def twin(self, model: nn.Module, use: Use) -> nn.Module | Decoder:
        """The model once more, around its very parameters, computed otherwise. A ``Decoder`` only to sample.

        The model stays byte for byte as it is. A twin takes every keyword that the model takes, sees changes of the weights at once
        (a decoder after ``refresh``), gives the same bits for the same inputs, and has the model's parameter names if
        ``use.even_passes``.
        """


class Kernels(Protocol):
    """The run's choice of kernels, each tried against the plain path by the host before it serves."""

    def module(self, model: nn.Module, use: Use) -> nn.Module:
        """A twin, or the model itself."""

    def decoder(self, model: nn.Module, use: Use, longest: int) -> Decoder:
        """A twin's, or the plain one, for rows of up to ``longest`` tokens."""
