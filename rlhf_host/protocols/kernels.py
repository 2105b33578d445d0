"""Interface of kernels, which compute the same as a model, but faster on one kind of device or model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from rlhf_host.protocols.common import Traits


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """The use of a twin."""

    purpose: Literal["train", "sample"]
    device: torch.device
    dtype: torch.dtype
    autocast: torch.dtype | None
    """Precision of matrix products, if it is not ``dtype``."""
    even_passes: bool = False
    """True if gradients must come in the same order on every rank (``BackendTraits.even_passes``)."""


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Describes one line that contains every distinct prompt once, then all completions (``models/layouts.py``).

    Every module of a decoder gets it as the keyword ``shared_rows``, with ``input_ids`` ``[1, N]``, ``position_ids`` that restart
    in each row, and an ``attention_mask`` of one element without meaning. Only attention needs it: every token of a row sees the
    tokens of its row up to itself.
    """

    count: int
    """Number of rows, ``B``."""
    length: int
    """Length of the longest row, ``L``."""
    gather: Tensor
    """``[B·L]`` int64: for every place of the padded rows, the index of its token in the line; 0 at padding."""
    back: Tensor
    """``[N]`` int64: for every token of the line, one of its places in the padded rows."""
    prompts: Sequence[int]
    """The length of every distinct prompt, in the order of the line."""
    lengths: Sequence[int]
    """Per row, the number of tokens after its prompt."""
    owners: Sequence[int]
    """Per row, the index of its prompt."""
    windows: dict[int, Tensor] = field(default_factory=dict)
    """Sliding window → mask ``[1, 1, L, L]`` of the tokens that a token sees, made by the first layer that needs it."""
    blocks: dict[int, Any] = field(default_factory=dict)
    """The same for FlexAttention, as torch's ``BlockMask`` over the line; 0: without a window."""


class Decoder(Protocol):
    """Sampler of one batch after another. Called on the compute thread, in inference mode."""

    ragged: bool
    """True if a batch may have prompts of different lengths."""

    def refresh(self) -> None:
        """Update everything derived from the weights, which have changed. May be called between two steps of a batch."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Start a batch. Return logits ``[G, V]`` of the token after each of ``G`` distinct prompts."""

    def start(self, prompt_of_row: Tensor, longest: int) -> None:
        """Set the rows: the prompt of each, ``[B]`` int64 and sorted. Each row gets at most ``longest`` more tokens."""

    def step(self, tokens: Tensor) -> Tensor:
        """Append ``tokens`` ``[B]`` int64. Return logits ``[B, V]`` of the next token."""

    def keep(self, rows: Tensor) -> None:
        """Continue only with these rows (sorted)."""


@runtime_checkable
class RefilledDecoder(Decoder, Protocol):
    """Optional interface of a decoder of fixed rows, in which other rows take the places of those that ended."""

    def refill(self, prompts: Sequence[Sequence[int]], prompt_of_row: Tensor, rows: Tensor) -> Tensor:
        """Give these ``rows`` ``[n]`` new prompts, those of ``prompt_of_row`` ``[n]``; both int64, on the CPU. Return logits ``[n,
        V]`` of the token after each row's prompt.
        """

    def end(self) -> None:
        """Free the memory of the batches so far; ``prefill`` may come again."""


TokenLogprobs: TypeAlias = "Callable[..., tuple[Tensor, Tensor | None]]"
"""Log-probabilities and entropy of a language-model head, from hidden states: a function with the arguments and results of
``rlhf_host.comparison.token_logprobs``.
"""


class KernelsPlugin(Protocol):
    """An entry point of the group ``rlhf.kernels``.

    It may have one method more: ``token_logprobs(use)`` returns the ``TokenLogprobs`` of heads, or ``None`` where there is none.
    """

    @property
    def traits(self) -> Traits:
        """Traits; they may depend on the options."""

    def unsuited(self, model: nn.Module, use: Use) -> str | None:
        """Say in a few words why it is not for this model and use; ``None``: try it. Must not compute anything."""

    def twin(self, model: nn.Module, use: Use) -> nn.Module | Decoder:
        """Return a second version of the model with the same parameters. It may be a ``Decoder`` only for sampling.

        The model itself must not change. A twin takes every keyword that the model takes, sees changes of the weights at once (a
        decoder after ``refresh``), gives the same bits for the same inputs, and with ``use.even_passes`` has the model's parameter
        names.
        """

    def choose(self, candidates: Sequence[tuple[str, KernelsPlugin]], plain: Kernels) -> Kernels:
        """Return the run's kernels: twins of the first of ``candidates`` (name and plugin) that suits and computes the same as the
        model, else those of ``plain``.

        The first candidate is asked. ``rlhf_kernels.choose`` compares, and logs what it uses, and what it does not and why, as
        warnings of ``rlhf_host.kernels``.
        """


class Kernels(Protocol):
    """The run's kernels, each compared with the plain path before it is used; or the plain path itself."""

    def module(self, model: nn.Module, use: Use) -> nn.Module:
        """Return a twin, or the model itself."""

    def like(self, probe: nn.Module, model: nn.Module, use: Use) -> tuple[nn.Module, nn.Module]:
        """Return twins of a small model, which can be run, and of a large one of the same kind; or both themselves."""

    def token_logprobs(self, use: Use) -> TokenLogprobs:
        """Return the function of heads: of kernels, or the plain one."""

    def decoder(self, model: nn.Module, use: Use, longest: int, pictured: bool = False) -> Decoder:
        """Return a decoder of kernels, or the plain one, for rows of up to ``longest`` tokens; ``pictured``: one that takes
        prompts with pictures (``records.pictures.Pictured``).
        """
