"""A model's weights on their way elsewhere: named as in its state dict, in buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from rlhf_host.protocols import Bucket


def named_weights(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and persistent buffers by every name they have: a tied head is named too, or an engine keeps its old one."""
    names = set(model.state_dict())
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return [(name, tensor.detach()) for name, tensor in found.items() if name in names]


def in_buckets(weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Pieces of about ``bucket_bytes``, each of one tensor at least."""
    bucket: Bucket = []
    held = 0
    for name, tensor in weights:
        size = tensor.numel() * tensor.element_size()
        if bucket and held + size > bucket_bytes:
            yield bucket
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += size
    if bucket:
        yield bucket
