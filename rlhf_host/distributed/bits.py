"""Sums of weights' bits, at both ends of a sync: proof that engines received what was sent, where log-probabilities cannot tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_host.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor

BITS = "bits"
"""Key in ``Weights.state`` and ``Loader.state``: the sums of the last sync by name. Where it is not there, none are made."""


def bits_of(tensor: Tensor) -> int:
    """Returns the sum of the elements' bits, read as whole numbers, modulo 2^64. Any device gives the same."""
    import torch

    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    return int(tensor.detach().contiguous().view(whole).sum(dtype=torch.int64))


def note_bits(state: dict[str, Any], bits: dict[str, int] | None) -> None:
    """Keeps the sums of a complete sync; with None the last ones stay."""
    if bits is not None:
        state[BITS] = bits


def kept_bits(end: Any) -> dict[str, int] | None:
    """Returns the sums of a ``Loader`` or ``Weights``; None from one that makes none."""
    bits: dict[str, int] | None = end.state.get(BITS)
    return bits


def keep_bits(weights: Any) -> None:
    """Has sums made of what is sent from now on."""
    weights.state.setdefault(BITS, {})


def compare_bits(sent: dict[str, int], came: dict[str, int], engine: str, version: int) -> None:
    """Raises ``RunError`` if an engine received other weights than were sent."""
    wrong = sorted(name for name in sent.keys() | came.keys() if sent.get(name) != came.get(name))
    if wrong:
        raise RunError(
            f"engine {engine} did not receive the weights of version {version} as the trainer sent them: {wrong[0]} differs"
            + (f", and {len(wrong) - 1} more" if wrong[1:] else "")
        )
