"""The shards of a source, and their rows from any place on, one after the other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf_host import UserError
from rlhf_host.internals import open_source
from rlhf_host.settings import DataSource

LINES = (".jsonl", ".ndjson")
KNOWN = (*LINES, ".parquet", ".arrow", ".csv", ".tsv", *(f"{kind}{end}" for kind in LINES for end in (".gz", ".bz2", ".xz")))

Row = tuple[Mapping[str, Any], str, int, int]
"""A row, its place for messages, the number of the next row, and the byte where that begins (0 if not read by bytes)."""


@dataclass(frozen=True, slots=True)
class Shards:
    """Shards of one source, in order."""

    count: int
    fingerprint: str
    root: Path | None
    """The directory of relative paths in the rows."""
    rows: Callable[[int, int, int], Iterator[Row]]
    """``(shard, row, byte)`` → the rows of a shard from one on."""

    def __len__(self) -> int:
        return self.count


def open_shards(path: str, subset: str | None, split: str) -> Shards:
    """Returns the shards of a file, a directory, a pattern such as ``data/*.parquet``, or a hub data set. Raises ``UserError`` if
    there are none."""
    place = Path(path).expanduser()
    if place.is_file():
        files = [place]
    elif place.is_dir():
        files = sorted(each for each in place.rglob("*") if each.is_file() and each.name.endswith(KNOWN))
    elif any(sign in path for sign in "*?["):
        base = Path(place.anchor) if place.is_absolute() else Path()
        files = sorted(base.glob(str(place.relative_to(place.anchor))))
    else:
        return _of_hub(path, subset, split)
    if not files:
        raise UserError(f"streaming: there is no file of {', '.join(KNOWN)} in {path}")
    if unknown := next((each for each in files if not each.name.endswith(KNOWN)), None):
        raise UserError(f"streaming: {unknown} cannot be read in parts: known are {', '.join(KNOWN)}")
    if subset is not None:
        raise UserError(f"streaming: hub_config is for hub data sets, and {path} has files")
    named = [f"{each} {each.stat().st_size}" for each in files]
    root = place if place.is_dir() else files[0].parent

    def rows(shard: int, row: int, byte: int) -> Iterator[Row]:
        return (_lines if files[shard].suffix in LINES else _others)(files[shard], row, byte)

    return Shards(len(files), hashlib.sha256("\n".join(named).encode()).hexdigest(), root, rows)


def _lines(path: Path, row: int, byte: int) -> Iterator[Row]:
    """Reads on from a byte: nothing before it is read again. Here rows are lines, empty ones too."""
    with path.open("rb") as file:
        file.seek(byte)
        for line in iter(file.readline, b""):
            row, byte = row + 1, byte + len(line)
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}:{row}: no JSON: {error}") from None
            if not isinstance(value, dict):
                raise UserError(f"{path}:{row}: a row is a JSON object, not a {type(value).__name__}")
            yield value, f"{path}:{row}", row, byte


def _others(path: Path, row: int, byte: int) -> Iterator[Row]:
    """Reads a file as any run does, and passes over the rows before."""
    opened = open_source(DataSource(path=str(path)), path.name, "train", {})
    for number, value in enumerate(islice(opened.rows, row, None), start=row):
        yield value, f"{path}, row {number + 1}", number + 1, 0


def _of_hub(path: str, subset: str | None, split: str) -> Shards:
    """Streams a hub data set, or any address that ``datasets`` reads. It is downloaded shard by shard, and nothing is kept."""
    from datasets import load_dataset

    try:
        data = load_dataset(path, subset, split=split, streaming=True)
    except Exception as error:  # network, gating and format errors of several libraries
        why = str(error).strip().splitlines() or [""]
        raise UserError(
            f"streaming: {path} is no file, directory or pattern here, and as a hub data set it failed with"
            f" {type(error).__name__}: {why[0]}"
        ) from error
    count = data.num_shards

    def rows(shard: int, row: int, byte: int) -> Iterator[Row]:
        part = data.shard(num_shards=count, index=shard)
        key = "python:streamed"
        plain = open_source(DataSource(path=key), path, "train", {key: part.skip(row) if row else part}).rows
        for number, value in enumerate(plain, start=row):
            yield value, f"{path}, shard {shard + 1}, row {number + 1}", number + 1, 0

    return Shards(count, hashlib.sha256(f"{path} {subset} {split} {count}".encode()).hexdigest(), None, rows)
