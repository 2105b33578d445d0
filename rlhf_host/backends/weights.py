"""A model's weights for other processes: named as in its state dict, in buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from torch import Tensor, nn

from rlhf_host.models.adapters import engine_weights, merged_weights
from rlhf_host.models.dtypes import master_of
from rlhf_host.protocols import Bucket

T = TypeVar("T")


def stored_weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters, or their masters, and persistent buffers as the model holds them, under every name they have."""
    names = set(model.state_dict())
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return {name: master_of(tensor).detach() for name, tensor in tensors.items() if name in names}


def named_weights(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Yields parameters and persistent buffers under every name they have. A tied head is named too, because an engine would
    keep its old one otherwise.

    Adapters are merged and 4-bit weights widened one by one, on demand; the model does not change.
    """
    return merged_weights(model, list(stored_weights(model).items()))


def adapter_buckets(model: nn.Module, bucket_bytes: int) -> Iterator[Bucket]:
    """Yields the trained adapter alone, for engines that have the base."""
    return in_buckets(engine_weights(model), bucket_bytes)


def in_buckets(weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Yields pieces of about ``bucket_bytes``, each with at least one tensor."""
    return chunked(weights, lambda weight: weight[1].nbytes, bucket_bytes)


def chunked(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yields the items in lists of sizes up to ``limit``; a larger item has its own list."""
    piece: list[T] = []
    total = 0
    for item in items:
        size = size_of(item)
        if piece and total + size > limit:
            yield piece
            piece, total = [], 0
        piece.append(item)
        total += size
    if piece:
        yield piece
