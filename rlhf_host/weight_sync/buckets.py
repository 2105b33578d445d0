"""Weights as bytes: the layout of a bucket, packing into one flat buffer and back, with renaming and casting."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_host.errors import RunError
from rlhf_host.protocols import Bucket, Buckets, Weights

ALIGNMENT = 64
SENT = "sent"
"""Key in ``Weights.state``: bytes and seconds of sending since ``take_sent``."""


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Places of a bucket's tensors in a flat buffer: ``(name, dtype, shape, offset, bytes)``; plain values."""

    entries: tuple[tuple[str, str, tuple[int, ...], int, int], ...]
    bytes: int

    @classmethod
    def of(cls, bucket: Bucket, dtype: torch.dtype | None = None) -> BucketLayout:
        """Returns the layout; floating-point tensors have the type ``dtype`` if it is given."""
        entries, offset = [], 0
        for name, tensor in bucket:
            kind = _cast(tensor.dtype, dtype)
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


def cast(bucket: Bucket, dtype: torch.dtype | None) -> Bucket:
    return [(name, tensor.to(_cast(tensor.dtype, dtype))) for name, tensor in bucket]


def _cast(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and own.is_floating_point else own


@contextmanager
def gathered(weights: Weights, bucket_bytes: int, dtype: torch.dtype | None = None) -> Iterator[Buckets]:
    """Gives the weights' buckets to the block, and always goes through all of them, even after an error there: gathering is
    collective, and other ranks go on.

    Args:
        dtype: as in ``Layout.of``: the type in which they are sent, so that ``take_sent`` counts correctly.
    """
    started, sent = time.perf_counter(), 0

    def counted() -> Iterator[Bucket]:
        nonlocal sent
        for bucket in buckets:
            sent += sum(tensor.numel() * _cast(tensor.dtype, dtype).itemsize for _, tensor in bucket)
            yield bucket

    buckets = weights.buckets(bucket_bytes)
    try:
        yield counted()
    finally:
        for _ in buckets:
            pass
    before, seconds = weights.state.get(SENT, (0, 0.0))
    weights.state[SENT] = before + sent, seconds + time.perf_counter() - started


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
