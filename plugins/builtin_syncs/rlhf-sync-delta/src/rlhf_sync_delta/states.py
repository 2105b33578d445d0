"""Weights of one step, bit by bit: their hash, and the difference between two."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bits: TypeAlias = "NDArray[Any]"
"""Values of a tensor as whole numbers of the same size, in one row."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GAPS = (np.uint8, np.uint16, np.uint32, np.uint64)


@dataclass(slots=True)
class State:
    """All weights after a step, by name, in the types in which they are sent. Weights under several names share memory."""

    step: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """On the CPU."""
    digests: dict[str, str] = field(default_factory=dict)
    """The sha256 of each tensor's bytes."""

    def put(self, name: str, tensor: Tensor, digest: str | None = None) -> None:
        self.tensors[name], self.digests[name] = tensor, digest_of(tensor) if digest is None else digest

    @property
    def hash(self) -> str:
        """The sha256 over names, types, shapes and digests, in the order of names."""
        rows = [[name, *kind_of(self.tensors[name]), self.digests[name]] for name in sorted(self.tensors)]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    @property
    def bytes(self) -> int:
        """Size of all weights, each counted once."""
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in self.tensors.values()}.values())


def kind_of(tensor: Tensor) -> tuple[str, list[int]]:
    """Returns a tensor's type and shape as plain values."""
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def bits_of(tensor: Tensor) -> Bits:
    """Returns the bits of a tensor on the CPU, in its own memory where it is contiguous."""
    bits: Bits = tensor.contiguous().reshape(-1).view(_BITS[tensor.element_size()]).numpy()
    return bits


def tensor_of(bits: Bits, dtype: str, shape: list[int]) -> Tensor:
    """Returns the tensor with these bits, in their memory."""
    return torch.from_numpy(bits).view(getattr(torch, dtype)).reshape(shape)


def number_type(dtype: str) -> np.dtype[Any]:
    """Returns the type of the bits of a tensor's type."""
    return np.dtype(str(_BITS[getattr(torch, dtype).itemsize]).removeprefix("torch."))


def digest_of(tensor: Tensor) -> str:
    return hashlib.sha256(bits_of(tensor).data).hexdigest()


def changed(before: Bits, after: Bits) -> tuple[Bits, Bits] | None:
    """Returns gaps and values of what changed; None where all values take less space.

    Returns:
        For each change the number of values since the one before, in the smallest type, and the new value.
    """
    places = np.flatnonzero(before != after)
    gaps = np.diff(places, prepend=-1) - 1
    largest = int(gaps.max(initial=0))
    kind = next(kind for kind in _GAPS if largest <= np.iinfo(kind).max)
    if len(places) * (np.dtype(kind).itemsize + after.itemsize) >= after.nbytes:
        return None
    return gaps.astype(kind), after[places]


def with_changes(before: Bits, gaps: Bits, values: Bits) -> Bits:
    """Returns a copy with the values of ``changed``. Raises ``ValueError`` for a place that does not exist."""
    places = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if len(places) and not 0 <= places[-1] < len(before):
        raise ValueError(f"a change at place {places[-1]} of {len(before)}")
    after = before.copy()
    after[places] = values
    return after
