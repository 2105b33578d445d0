"""Functions that run beside the weights: at the trainer, which saves them, and at an opponent's engine, which loads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_host import RunError
from rlhf_host.commands import new_directory

if TYPE_CHECKING:
    from rlhf_host.protocols import Bucket, Buckets, Loader, Weights

BUCKET_BYTES = 2**28
"""Size of a file, and of the weights that are gathered or loaded at a time."""


def save(weights: Weights, directory: str) -> None:
    """Writes the trainer's weights under every name, a file for each bucket. Collective over the ranks; the first one writes."""
    buckets = weights.buckets(BUCKET_BYTES)
    try:
        if weights.rank == 0:
            with new_directory(Path(directory)) as new:
                _write(buckets, new)
    finally:
        for _ in buckets:  # the other ranks go on to the end, whatever fails here
            pass


def load(loader: Loader, directory: str, version: int) -> None:
    """Replaces the weights of an engine by saved ones, as ``version``. Raises ``RunError`` for files that cannot be read, and for
    other weights than the model's.
    """
    try:
        loader.load(_read(Path(directory)), version)
    except RunError as error:
        raise RunError(f"the opponent in {directory} cannot be loaded: {error}") from error


def _write(buckets: Buckets, directory: Path) -> None:
    from safetensors.torch import save_file

    for number, bucket in enumerate(buckets):
        # Tied weights come under each name, and a file takes no two tensors with one memory.
        save_file({name: weight.detach().cpu().clone() for name, weight in bucket}, directory / f"{number:05d}.safetensors")


def _read(directory: Path) -> Iterator[Bucket]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    for path in sorted(directory.glob("*.safetensors")):
        try:
            yield list(load_file(path).items())
        except (OSError, SafetensorError) as error:
            raise RunError(f"{path.name} cannot be read: {error}") from error
