"""Weights as bytes: the layout of a bucket, packing into one flat buffer and back, with renaming and casting."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_host.distributed.bits import BITS, bits_of, note_bits
from rlhf_host.errors import RunError
from rlhf_host.protocols import Bucket, Buckets, Weights

ALIGNMENT = 64
SLOTS = 2
"""Number of buffers of a route: one bucket is packed or loaded while the other is on its way."""
SENT = "sent"
"""Key in ``Weights.state``: bytes and seconds of sending since ``take_sent``."""


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Places of a bucket's tensors in a flat buffer: ``(name, dtype, shape, offset, bytes)``; plain values."""

    entries: tuple[tuple[str, str, tuple[int, ...], int, int], ...]
    bytes: int

    @classmethod
    def of(cls, bucket: Bucket, wire: Wire | None = None) -> BucketLayout:
        """Returns the layout; tensors have the types of ``wire``, by default their own."""
        wire = wire or Wire()
        entries, offset = [], 0
        for name, tensor in bucket:
            kind = wire.type_of(name, tensor.dtype)
            size = tensor.numel() * kind.itemsize
            entries.append((name, dtype_name(kind), tuple(tensor.shape), offset, size))
            offset += -(-size // ALIGNMENT) * ALIGNMENT
        return cls(tuple(entries), offset)

    @classmethod
    def from_plain(cls, value: Mapping[str, Any]) -> BucketLayout:
        entries = ((name, kind, tuple(shape), offset, size) for name, kind, shape, offset, size in value["entries"])
        return cls(tuple(entries), value["bytes"])

    def to_plain(self) -> dict[str, Any]:
        return {"entries": self.entries, "bytes": self.bytes}

    def pack(self, bucket: Bucket, buffer: Tensor) -> None:
        """Copies the tensors into ``buffer`` (uint8, at least ``bytes`` long), casting them."""
        for (_, view), (_, tensor) in zip(self.views(buffer), bucket, strict=True):
            view.copy_(tensor)

    def views(self, buffer: Tensor) -> Bucket:
        """Returns the tensors in ``buffer``, without copying."""
        return [
            (name, buffer[offset : offset + size].view(dtype_of(kind)).view(shape))
            for name, kind, shape, offset, size in self.entries
        ]


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Wire:
    """Types in which weights are sent. Numbers that are not floating-point keep theirs."""

    asked: torch.dtype | None = None
    """The type of all of them, if the run asks for one."""
    kept: torch.dtype | None = None
    """The type in which all engines keep them: more bits than that need not be sent."""
    others: tuple[str, ...] = ()
    """Beginnings of names that engines may keep in another type."""

    def type_of(self, name: str, own: torch.dtype) -> torch.dtype:
        """Returns the type of a weight, which is ``own`` at the trainer. ``name`` is the engine's."""
        if not own.is_floating_point:
            return own
        if self.asked is not None or self.kept is None or name.startswith(self.others):
            return self.asked or own
        return self.kept if self.kept.itemsize < own.itemsize else own

    def to_plain(self) -> dict[str, Any]:
        names = [None if dtype is None else dtype_name(dtype) for dtype in (self.asked, self.kept)]
        return {"asked": names[0], "kept": names[1], "others": list(self.others)}

    @classmethod
    def from_plain(cls, value: Mapping[str, Any]) -> Wire:
        asked, kept = (None if value[key] is None else dtype_of(value[key]) for key in ("asked", "kept"))
        return cls(asked, kept, tuple(value["others"]))


@contextmanager
def gathered(
    weights: Weights, bucket_bytes: int, wire: Wire, rename: Mapping[str, str], *, everywhere: bool = False
) -> Iterator[Buckets]:
    """Gives the weights' buckets to the block, under the engines' names, and always goes through all of them, even after an error
    there: gathering is collective, and other ranks go on.

    Args:
        wire: the types in which they are sent, so that ``take_sent`` counts correctly.
        everywhere: as in ``Weights.buckets``.
    """
    started, sent = time.perf_counter(), 0

    def counted() -> Iterator[Bucket]:
        nonlocal sent
        for bucket in renamed(buckets, rename):
            sent += sum(tensor.numel() * wire.type_of(name, tensor.dtype).itemsize for name, tensor in bucket)
            if bits is not None:
                bits.update((name, bits_of(tensor.to(wire.type_of(name, tensor.dtype)))) for name, tensor in bucket)
            yield bucket

    bits: dict[str, int] | None = None if weights.rank or BITS not in weights.state else {}
    buckets = weights.buckets(bucket_bytes, everywhere)
    try:
        yield counted()
    finally:
        for _ in buckets:
            pass
    note_sent(weights, sent, time.perf_counter() - started)
    note_bits(weights.state, bits)


def note_sent(weights: Weights, size: int, seconds: float) -> None:
    """Counts bytes that this rank sent in a complete sync, and the seconds that it took, for ``take_sent``."""
    before, earlier_s = weights.state.get(SENT, (0, 0.0))
    weights.state[SENT] = before + size, earlier_s + seconds


def take_sent(weights: Weights) -> tuple[int, float]:
    """Returns the bytes that this rank sent in complete syncs since the last call, and the seconds that these took."""
    sent: tuple[int, float] = weights.state.pop(SENT, (0, 0.0))
    return sent


def renamed(buckets: Iterable[Bucket], names: Mapping[str, str]) -> Iterator[Bucket]:
    """Yields weights under the names that an engine uses. A key of ``names`` is a whole name, or a prefix that ends in a dot;
    the longest match is used.

    Raises:
        RunError: two weights get the same name.
    """
    if not names:
        yield from buckets
        return
    prefixes = sorted((key for key in names if key.endswith(".")), key=len, reverse=True)
    sources: dict[str, str] = {}
    for bucket in buckets:
        out: Bucket = []
        for name, tensor in bucket:
            new = names.get(name)
            if new is None:
                prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
                new = name if prefix is None else names[prefix] + name.removeprefix(prefix)
            if sources.setdefault(new, name) != name:
                raise RunError(f"rename gives {sources[new]} and {name} the same name, {new}")
            out.append((new, tensor))
        yield out
