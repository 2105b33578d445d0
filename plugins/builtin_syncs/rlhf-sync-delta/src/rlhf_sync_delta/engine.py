"""The engine's end: keeps a copy of the last version, changes it, and loads whole tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_host.protocols import Bucket, Buckets, Loader
from rlhf_sync_delta.files import rebuild
from rlhf_sync_delta.states import State

HELD = "rlhf_sync_delta"
"""Key in ``Loader.state``: the weights of the last version."""


def weight_types(loader: Loader) -> Any:
    """Returns ``WeightTypes.weight_types`` of a loader that has it."""
    return getattr(loader, "weight_types", None)


def receive(loader: Loader, directory: str, step: int, bucket_bytes: int) -> None:
    """Loads the weights of a step. An engine that has not the step before reads whole weights and what changed since.

    Raises:
        UserError: a file is missing or damaged.
    """
    held = rebuild(Path(directory), step, loader.state.pop(HELD, None))
    loader.load(_buckets(held, bucket_bytes), step)
    loader.state[HELD] = held


def _buckets(state: State, bucket_bytes: int) -> Buckets:
    bucket: Bucket = []
    size = 0
    for name, tensor in state.tensors.items():
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket
