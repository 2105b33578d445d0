"""The shards of a source, and their rows from any place on, one after the other."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf_host import UserError
from rlhf_host.internals import kind_of, open_source
from rlhf_host.settings import DataSource

LINES, TABLES = (".jsonl", ".ndjson"), (".csv", ".tsv")
KINDS, COMPRESSED = (*LINES, *TABLES, ".parquet", ".arrow"), (".gz", ".bz2", ".xz")
KNOWN = (*KINDS, *(f"{kind}{end}" for kind in LINES + TABLES for end in COMPRESSED))
TOLD = f"{', '.join(KINDS)}, and texts with {', '.join(COMPRESSED)}"

Row = tuple[Mapping[str, Any], Callable[[], str], int, int]
"""A row, a function that tells its place, the number of the next row, and the byte where that begins (0 if not read by bytes)."""


@dataclass(frozen=True, slots=True)
class Shards:
    """Shards of one source, in order."""

    count: int
    fingerprint: str
    root: Path | None
    """The directory of relative paths in the rows."""
    rows: Callable[[int, int, int], Iterator[Row]]
    """``(shard, row, byte)`` → the rows of a shard from one on."""
    unread: tuple[str, ...] = ()
    """Files of a directory that are of no known kind."""

    def __len__(self) -> int:
        return self.count


def open_shards(path: str, subset: str | None, split: str) -> Shards:
    """Returns the shards of a file, a directory, a pattern such as ``data/*.parquet``, or a hub data set. Raises ``UserError`` if
    there are none."""
    place, unread = Path(path).expanduser(), []
    if place.is_file():
        files = [place]
    elif place.is_dir():
        inside = sorted(each for each in place.rglob("*") if not each.is_dir())
        files = [each for each in inside if _is_known(each)]
        unread = [str(each.relative_to(place)) for each in inside if not _is_known(each)]
    elif any(sign in path for sign in "*?["):
        base = Path(place.anchor) if place.is_absolute() else Path()
        files = sorted(base.glob(str(place.relative_to(place.anchor))))
    elif _is_known(place) or path.startswith((".", "/", "~")):
        raise UserError(f"streaming: {path}: no such file or directory")
    else:
        return _of_hub(path, subset, split)
    if not files:
        raise UserError(f"streaming: there is no file of {TOLD} in {path}")
    if unknown := next((each for each in files if not _is_known(each)), None):
        raise UserError(f"streaming: {unknown} cannot be read in parts: known are {TOLD}")
    if lost := next((each for each in files if not each.is_file()), None):
        raise UserError(f"streaming: {lost} is a directory, or a link to nothing: take it out of {path}")
    if subset is not None:
        raise UserError(f"streaming: hub_config is for hub data sets, and {path} has files")
    sizes = [each.stat().st_size for each in files]
    named = "\n".join(f"{each} {size}" for each, size in zip(files, sizes, strict=True))
    root = place if place.is_dir() else files[0].parent

    def rows(shard: int, row: int, byte: int) -> Iterator[Row]:
        file = files[shard]
        if not file.is_file() or file.stat().st_size != sizes[shard]:
            raise UserError(f"streaming: {file} has changed or is gone since the run read its size: put it back and resume")
        return (_lines if file.suffix.lower() in LINES else _others)(file, row, byte)

    return Shards(len(files), hashlib.sha256(named.encode()).hexdigest(), root, rows, tuple(unread))


def _is_known(path: Path) -> bool:
    return path.name.lower().endswith(KNOWN)


def _lines(path: Path, row: int, byte: int) -> Iterator[Row]:
    """Reads on from a byte: nothing before it is read again. Here rows are lines, empty ones too."""
    with path.open("rb") as file:
        file.seek(byte)
        for line in iter(file.readline, b""):
            row, byte = row + 1, byte + len(line)
            value = _parsed(line.removeprefix(codecs.BOM_UTF8) if row == 1 else line, f"{path}:{row}")
            if value is not None:
                yield value, partial("{}:{}".format, path, row), row, byte


def _parsed(line: bytes, place: str) -> Mapping[str, Any] | None:
    """Returns the row of a line; None for an empty one."""
    if not line.strip():
        return None
    try:
        value = json.loads(line.decode("utf-8").rstrip("\r\n"))
    except RecursionError:
        raise UserError(f"{place}: JSON nested too deeply") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: not valid JSON: {error.msg} at column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line") from None
    except ValueError as error:  # a number of thousands of digits
        raise UserError(f"{place}: not valid JSON: {str(error).partition(';')[0]}") from None
    if not isinstance(value, dict):
        raise UserError(f"{place}: a row is a JSON object, not {kind_of(value)}")
    return value


def _others(path: Path, row: int, byte: int) -> Iterator[Row]:
    """Reads a file as any run does, and passes over the rows before."""
    opened = open_source(DataSource(path=str(path)), path.name, "train", {})
    for number, value in enumerate(islice(opened.rows, row, None), start=row):
        yield value, partial(opened.where, number), number + 1, 0


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
            yield value, partial("{}, shard {}, row {}".format, path, shard + 1, number + 1), number + 1, 0

    return Shards(count, hashlib.sha256(f"{path} {subset} {split} {count}".encode()).hexdigest(), None, rows)
