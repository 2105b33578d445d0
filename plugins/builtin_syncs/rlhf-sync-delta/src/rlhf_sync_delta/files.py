"""Files of a run's steps: ``step-000137.delta`` has what changed since the step before, ``step-000100.whole`` all weights.

The first line is ``rlhf-sync-delta 1``, the sha256 of all that follows, and the step that the file builds on. The second is JSON:
hashes of the weights before and after, and an entry for each tensor that changed. The rest is the entries' bytes: of ``sparse``
gaps and values, of ``whole`` all values. ``same`` has the bytes of another entry, and ``file`` those of a file of a model.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhf_host import UserError
from rlhf_sync_delta.states import Bits, State, bits_of, changed, kind_of, number_type, tensor_of, with_changes

MAGIC = "rlhf-sync-delta 1"
DELTA, WHOLE = "delta", "whole"
_NAME = re.compile(rf"step-(\d{{6,}})\.({DELTA}|{WHOLE})")
_FIRST = re.compile(rf"{MAGIC} ([0-9a-f]{{64}}) (\d+|-)\n".encode())


def path_of(directory: Path, step: int, kind: str) -> Path:
    return directory / f"step-{step:06d}.{kind}"


def files_of(directory: Path) -> list[tuple[int, str, Path]]:
    """Returns step, kind and path of the files there, by step."""
    names = directory.iterdir() if directory.is_dir() else ()
    return sorted((int(match[1]), match[2], path) for path in names if (match := _NAME.fullmatch(path.name)))


def steps_of(directory: Path) -> list[int]:
    """Returns the steps that can be rebuilt: those that lead to whole weights without a gap."""
    whole: set[int] = set()
    for step, kind, path in files_of(directory):
        if kind == WHOLE or _base(path) in whole:
            whole.add(step)
    return sorted(whole)


def _base(path: Path) -> int | None:
    """Returns the step that a file builds on, as its first line says; None: it says none, or is gone."""
    try:
        with path.open("rb") as file:
            match = _FIRST.fullmatch(file.readline(200))
    except OSError:  # a run that goes on removes files
        return None
    return int(match[2]) if match and match[2] != b"-" else None


@dataclass(frozen=True)
class Record:
    """A file, read and compared with its hash."""

    path: Path
    header: Mapping[str, Any]
    payload: bytes

    @property
    def base(self) -> tuple[int, str] | None:
        """Step and hash that it builds on."""
        base = self.header["base"]
        return None if base is None else (base["step"], base["hash"])

    @cached_property
    def hash(self) -> str:
        return str(self.header["hash"])

    def build(self, before: State | None) -> State:
        """Returns the weights after this step.

        Raises:
            UserError: they do not have the hash that was written, or a file of a model is gone.
        """
        old = before if self.base is not None else None
        state = State(self.header["step"], *(({**old.tensors}, {**old.digests}) if old else ({}, {})))
        place = 0
        for entry in self.header["entries"]:
            tensor, place = self._tensor(entry, state, place)
            state.put(entry["name"], tensor)
            if state.digests[entry["name"]] != entry["sha256"]:
                raise self._damaged(f"{entry['name']} does not have the hash that was written")
        if state.hash != self.hash:
            raise self._damaged("the weights do not have the hash that was written")
        return state

    def _tensor(self, entry: Mapping[str, Any], state: State, place: int) -> tuple[Tensor, int]:
        """Returns an entry's tensor, and where the next entry's bytes begin."""
        name, dtype, shape, kind = (entry[key] for key in ("name", "dtype", "shape", "kind"))
        if kind == "same":
            return state.tensors[entry["of"]], place
        if kind == "file":
            return self._of_model(name, dtype, entry["file"]), place
        if kind == WHOLE:
            bits, place = self._take(number_type(dtype), int(np.prod(shape)), place)
            return tensor_of(bits, dtype, shape), place
        gaps, place = self._take(np.dtype(entry["gaps"]), entry["count"], place)
        values, place = self._take(number_type(dtype), entry["count"], place)
        return tensor_of(with_changes(bits_of(state.tensors[name]), gaps, values), dtype, shape), place

    def _take(self, kind: np.dtype[Any], count: int, place: int) -> tuple[Bits, int]:
        return np.frombuffer(self.payload, kind, count, place).copy(), place + count * kind.itemsize

    def _of_model(self, name: str, dtype: str, file: str) -> Tensor:
        path = Path(self.header["model"]) / file
        try:
            tensor = read_tensor(path, name, dtype)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self.path} refers to {path}, which cannot be read: {error}; put it back") from error
        return tensor

    def _damaged(self, problem: str) -> UserError:
        model = self.header.get("model")
        return UserError(f"{self.path} is damaged: {problem}" + (f"; was {model} changed?" if model else ""))


def read_tensor(path: Path, name: str, dtype: str) -> Tensor:
    """Returns a tensor of a model's file, in the type ``dtype``."""
    import torch

    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor.to(getattr(torch, dtype)).contiguous()


def read(path: Path) -> Record:
    """Reads a file. Raises ``UserError`` if it is not as it was written, or cannot be read."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read here: {error.strerror} (all machines must see sync.directory)") from error
    first, _, rest = content.partition(b"\n")
    match = _FIRST.fullmatch(first + b"\n")
    if match is None or hashlib.sha256(rest).hexdigest() != match[1].decode():
        raise UserError(f"{path} is damaged: it is not as it was written")
    line, _, payload = rest.partition(b"\n")
    header = json.loads(line)
    return Record(path, header, zlib.decompress(payload) if header["compressed"] else payload)


def rebuild(directory: Path, step: int, held: State | None = None) -> State:
    """Returns the weights of a step, from whole ones before it and what changed since.

    Args:
        held: weights of an earlier step, which save reading; they are not changed.

    Raises:
        UserError: a file is missing, damaged, or does not fit the one before.
    """
    records: list[Record] = []
    state: State | None = None
    number = step
    while True:
        delta, whole = (path_of(directory, number, kind) for kind in (DELTA, WHOLE))
        record = read(delta) if delta.exists() else None
        if record is not None and record.base is not None and held is not None and record.base == (held.step, held.hash):
            records.append(record)
            state = held
            break
        if whole.exists():
            records.append(read(whole))
            break
        if record is None or record.base is None:
            raise UserError(f"{delta} is missing: no step after it can be rebuilt before the next whole one")
        records.append(record)
        number = record.base[0]
    for record in reversed(records):
        if record.base is not None and (state is None or state.hash != record.base[1]):
            raise UserError(f"{record.path} does not fit the step before: it was written after another one")
        state = record.build(state)
    assert state is not None
    return state


def whole_record(state: State, model: Path | None = None) -> tuple[dict[str, Any], list[Bits]]:
    """Returns header and bytes of all weights; of weights that a model's files have, only where they are.

    Args:
        model: directory of a model that may be equal.
    """
    places = _in_files(state, model) if model is not None else None
    entries, parts, named = [], list[Bits](), dict[int, str]()
    for name, tensor in state.tensors.items():
        entry = _entry(state, name)
        if (other := named.setdefault(tensor.data_ptr(), name)) != name and tensor.numel():
            entry |= {"kind": "same", "of": other}
        elif places is not None and name in places:
            entry |= {"kind": "file", "file": places[name]}
        else:
            entry |= {"kind": WHOLE}
            parts.append(bits_of(tensor))
        entries.append(entry)
    header = {"step": state.step, "base": None, "hash": state.hash, "compressed": False, "entries": entries}
    return header | ({"model": str(model)} if places is not None else {}), parts


def _in_files(state: State, model: Path) -> dict[str, str] | None:
    """Returns the file of each tensor in a model's directory; None if one is missing or another there."""
    places: dict[str, str] = {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            places |= dict.fromkeys(file.keys(), path.name)
    seen: set[int] = set()
    for name, tensor in state.tensors.items():
        if tensor.data_ptr() in seen or not tensor.numel():
            continue
        seen.add(tensor.data_ptr())
        dtype, shape = kind_of(tensor)
        if name not in places:
            return None
        other = read_tensor(model / places[name], name, dtype)
        if list(other.shape) != shape or not np.array_equal(bits_of(other), bits_of(tensor)):
            return None
    return places


def delta_record(before: State, after: State, *, compress: bool) -> tuple[dict[str, Any], list[Any]]:
    """Returns header and bytes of what changed between two states with the same names, types and shapes."""
    entries, parts, named = [], list[Any](), dict[int, str]()
    for name, tensor in after.tensors.items():
        if after.digests[name] == before.digests[name]:
            named.setdefault(tensor.data_ptr(), name)
            continue
        entry = _entry(after, name)
        if (other := named.setdefault(tensor.data_ptr(), name)) != name:
            entries.append(entry | {"kind": "same", "of": other})
            continue
        bits = bits_of(tensor)
        if (change := changed(bits_of(before.tensors[name]), bits)) is None:
            entry |= {"kind": WHOLE}
            parts.append(bits)
        else:
            gaps, values = change
            entry |= {"kind": "sparse", "gaps": str(gaps.dtype), "count": len(values)}
            parts += [gaps, values]
        entries.append(entry)
    if compress:
        packer = zlib.compressobj(1)
        parts = [*(packer.compress(part.data) for part in parts), packer.flush()]
    base = {"step": before.step, "hash": before.hash}
    return {"step": after.step, "base": base, "hash": after.hash, "compressed": compress, "entries": entries}, parts


def _entry(state: State, name: str) -> dict[str, Any]:
    dtype, shape = kind_of(state.tensors[name])
    return {"name": name, "dtype": dtype, "shape": shape, "sha256": state.digests[name]}


def write(path: Path, header: Mapping[str, Any], parts: list[Any]) -> int:
    """Writes a file that appears complete or not at all. Returns its size in bytes."""
    rest = [json.dumps(header).encode() + b"\n", *(part.data if isinstance(part, np.ndarray) else part for part in parts)]
    digest = hashlib.sha256()
    for part in rest:
        digest.update(part)
    base = "-" if header["base"] is None else header["base"]["step"]
    aside = path.with_name(f".{path.name}.partial")
    with aside.open("wb") as file:
        for part in (f"{MAGIC} {digest.hexdigest()} {base}\n".encode(), *rest):
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    aside.replace(path)
    flush(path.parent)
    return size


def flush(directory: Path) -> None:
    """Waits until a directory's entries are on disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(directory: Path, steps: Iterator[int] | list[int]) -> None:
    """Removes the files of some steps, the last first, so that what remains can be rebuilt even if this is cut short."""
    gone = set(steps)
    for step, _, path in reversed(files_of(directory)):
        if step in gone:
            path.unlink(missing_ok=True)
