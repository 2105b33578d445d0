"""Both ends of ``checkpoint``: a version of the weights as sharded safetensors."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf_host.directories import flush, remove_directory
from rlhf_host.distributed.sync.buckets import Bucket, Wire, dtype_of, gathered
from rlhf_host.errors import RunError
from rlhf_host.protocols import Loader, Weights

INDEX = "model.safetensors.index.json"
_VERSION = re.compile(r"version-(\d{6,})")


def version_directory(directory: str, version: int) -> Path:
    return Path(directory) / f"version-{version:06d}"


def versions(directory: str) -> list[int]:
    """Returns the complete versions, oldest first."""
    return sorted(int(match[1]) for path in Path(directory).glob("version-*") if (match := _VERSION.fullmatch(path.name)))


def write(
    weights: Weights, directory: str, version: int, keep: int, bucket_bytes: int, dtype: str | None, rename: Mapping[str, str]
) -> None:
    """Writes all weights, one shard per bucket."""
    wire = Wire(None if dtype is None else dtype_of(dtype))
    with gathered(weights, bucket_bytes, wire, rename) as buckets:
        if weights.rank:
            return
        path = version_directory(directory, version)
        aside = path.with_name(f".{path.name}.partial")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        _write_shards(aside, buckets, wire, version)
        if path.exists():  # another run's
            remove_directory(path)
        aside.rename(path)
        flush(path.parent)
        for old in versions(directory)[:-keep]:
            if old < version:
                remove_directory(version_directory(directory, old))


def _write_shards(directory: Path, buckets: Iterator[Bucket], wire: Wire, version: int) -> None:
    where: dict[str, str] = {}
    size = 0
    for number, bucket in enumerate(buckets):
        name = f"model-{number + 1:05d}.safetensors"
        whole = _apart([(name, tensor.to(wire.type_of(name, tensor.dtype))) for name, tensor in bucket])
        save_file(whole, directory / name, metadata={"format": "pt"})
        flush(directory / name)
        where.update(dict.fromkeys(whole, name))
        size += sum(tensor.nbytes for tensor in whole.values())
    index = {"metadata": {"total_size": size, "version": version}, "weight_map": where}
    (directory / INDEX).write_text(json.dumps(index, indent=1))
    flush(directory / INDEX)
    flush(directory)


def _apart(bucket: Bucket) -> dict[str, Tensor]:
    """Copies weights that are tied or strided, which safetensors does not accept."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in bucket:
        place = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if place in seen else tensor.contiguous()
        seen.add(place)
    return tensors


def read(loader: Loader, directory: str, version: int) -> None:
    """Loads a version from its files."""
    path = version_directory(directory, version)
    try:
        where = json.loads((path / INDEX).read_text())["weight_map"]
    except OSError as error:
        raise RunError(
            f"{path} cannot be read here ({error.strerror}): --sync.directory has to be on storage all share"
        ) from error
    loader.load(_shards(path, where), version)


def _shards(path: Path, where: Mapping[str, str]) -> Iterator[Bucket]:
    for shard in sorted(set(where.values())):
        with safe_open(path / shard, framework="pt") as file:
            yield [(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118
