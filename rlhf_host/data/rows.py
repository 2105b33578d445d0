"""Rows of files, dataset directories and hub datasets, each with its place of origin."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import json
import lzma
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from glob import escape
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rlhf_host.data.plain import plain_rows
from rlhf_host.errors import UserError, near_matches

if TYPE_CHECKING:
    import datasets

LINES = (".jsonl", ".ndjson")
TABLES = {".csv": ",", ".tsv": "\t"}
COMPRESSED = (".gz", ".bz2", ".xz")
ARROW = {".parquet": "parquet", ".arrow": "arrow"}
"""Suffix → the reader of ``datasets``."""
SUFFIXES = (*LINES, ".json", *TABLES, *ARROW)
_BATCH = 250  # rows; by default as many as the first group of a file has, which may be none
_BUFFER = 1 << 20  # bytes of a Parquet file that are read at once; by default all that are asked for

_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that can be read once, in order; ``where(i)`` is the place of row number ``i``, for messages."""

    rows: Iterable[Row]
    where: Callable[[int], str]
    note: str = ""
    """Choices made without being asked for (a subset, a split)."""
    fingerprint: str | None = None
    """Fingerprint of a hub dataset's content."""
    root: Path | None = None
    """The directory of relative paths in the rows; ``None``: the current one."""


def looks_like_a_file(path: str) -> bool:
    """Returns True if a path that does not exist was meant as a file or directory rather than a name."""
    return path.startswith((".", "/", "~")) or "\\" in path or path.count("/") > 1 or file_format(Path(path)) != ""


def file_format(path: Path) -> str:
    """Returns the suffix that tells how to read a file, without a compression suffix; empty if it is none of ``SUFFIXES``."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in SUFFIXES else ""


def read_path(path: Path, subset: str | None, split: str | None, default_splits: tuple[str, ...]) -> Rows:
    """Returns the rows of a file or a directory. Raises ``UserError`` for unknown formats and directories without data."""
    if path.is_dir():
        return replace(_read_directory(path, subset, split, default_splits), root=path)
    if not path.is_file():
        raise UserError(f"{path} is a pipe or a device, and data is read more than once: write it to a file first")
    if subset is not None or split is not None:
        raise UserError(f"{path} is one file: subset and split are for directories and hub datasets")
    return replace(_read_file(path), root=path.parent)


def read_hub(name: str, subset: str | None, split: str | None, default_splits: tuple[str, ...]) -> Rows:
    """Returns the rows of a hub dataset, downloaded once into the cache of ``datasets``. Raises ``UserError`` if it cannot be
    loaded.
    """
    try:
        builder, note = _builder(name, subset)
        builder.download_and_prepare()
        chosen, split_note = _choose_split(list(builder.info.splits or ()), split, default_splits, name)
        dataset = builder.as_dataset(split=chosen)
    except UserError:
        raise
    except Exception as error:  # network, gating, cache and format errors of several libraries
        raise UserError(
            f"cannot load {name!r}: it is no file or directory here and no installed task plugin, and as a hub dataset it "
            f"failed with {type(error).__name__}: {_first_line(error)}; check the name and the network "
            "(without one, give a local file)"
        ) from error
    fingerprint = getattr(dataset, "_fingerprint", None)
    return _of_dataset(dataset, f"{name} ({chosen})", _notes(note, split_note), fingerprint)


def _of_dataset(dataset: Iterable[Row], name: str, note: str = "", fingerprint: str | None = None) -> Rows:
    return Rows(plain_rows(dataset), lambda i: f"{name}, row {i + 1}", note, fingerprint)


def _read_file(path: Path) -> Rows:
    kind = file_format(path)
    if not kind:
        raise UserError(f"{path}: cannot tell its format from its name; known are {', '.join(SUFFIXES)}, also with .gz")
    if kind in LINES:
        return _read_lines(path)
    if kind == ".json":
        return _read_json(path)
    if kind in TABLES:
        return _read_table(path, TABLES[kind])
    options: dict[str, Any] = {}
    if kind == ".parquet":
        from pyarrow.dataset import ParquetFragmentScanOptions

        scan = ParquetFragmentScanOptions(pre_buffer=False, use_buffered_stream=True, buffer_size=_BUFFER)
        options = {"batch_size": _BATCH, "fragment_scan_options": scan}
    return Rows(_stream(ARROW[kind], path, **options), lambda i: f"{path}, row {i + 1}")


def _read_lines(path: Path) -> Rows:
    lines: list[int] = []

    return Rows(_objects(_text_lines(path), path, lines), lambda i: f"{path}:{lines[i]}")


def _objects(texts: Iterable[str], path: Path, lines: list[int]) -> Iterator[Row]:
    """Yields one JSON object per line; appends the numbers of their lines to ``lines``."""
    # Parsed here: the reader of ``datasets`` gives no line for a bad row, makes timestamps of dates and floats of large integers.
    for number, line in enumerate(texts, start=1):
        if line.strip():
            row = _parse(line, path, number)
            lines.append(number)
            yield row


def _parse(text: str, path: Path, line: int) -> Row:
    with _json_errors(path, line, line - 1):
        row = json.loads(text)
    if not isinstance(row, dict):
        raise UserError(f"{path}:{line}: expected an object {{...}}, got {_kind(row)}")
    return row


@contextmanager
def _json_errors(path: Path, line: int, before: int) -> Iterator[None]:
    """Reports JSON errors. ``line``: where the object begins; ``before``: lines of the file before the text that is read."""
    try:
        yield
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{before + error.lineno}: not valid JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise UserError(f"{path}:{line}: JSON nested too deeply") from error
    except ValueError as error:  # a number of thousands of digits
        raise UserError(f"{path}:{line}: not valid JSON: {_first_line(error).partition(';')[0]}") from error


def _read_json(path: Path) -> Rows:
    lines: list[int] = []

    def rows() -> Iterator[Row]:
        text = "\n".join(_text_lines(path))
        if not text.strip():
            return
        if text.lstrip()[:1] != "{":
            yield from _elements(text, path, lines)
            return
        try:  # JSON lines under the name ``.json``, as many exports are
            yield from _objects(text.split("\n"), path, lines)
        except UserError as error:
            raise UserError(f"{error} (expected a list of objects, or one object a line)") from error

    return Rows(rows(), lambda i: f"{path}:{lines[i]}")


def _elements(text: str, path: Path, lines: list[int]) -> Iterator[Row]:
    """Yields the objects of a JSON list, each with the line it begins on."""
    decoder = json.JSONDecoder()
    here, line = 0, 1

    def advance(position: int) -> str:
        """Goes past the spaces at ``position``; returns the first character after them."""
        nonlocal here, line
        end = next((i for i in range(position, len(text)) if text[i] not in " \t\n\r"), len(text))
        line += text.count("\n", here, end)
        here = end
        return text[end : end + 1]

    if advance(0) != "[":
        raise UserError(f"{path}:{line}: expected a list of objects, or one object a line")
    if advance(here + 1) == "]":
        return
    while True:
        with _json_errors(path, line, 0):
            row, end = decoder.raw_decode(text, here)
        if not isinstance(row, dict):
            raise UserError(f"{path}:{line}: expected an object {{...}}, got {_kind(row)}")
        lines.append(line)
        yield row
        mark = advance(end)
        if mark == "]":
            break
        if mark != ",":
            raise UserError(f"{path}:{line}: not valid JSON: expected ',' or ']' between the list's objects")
        advance(here + 1)
    if advance(here + 1):
        raise UserError(f"{path}:{line}: not valid JSON: text after the list")


def _read_table(path: Path, separator: str) -> Rows:
    def records() -> Iterator[tuple[int, list[str]]]:
        """Yields line and fields of each record, the header first; only for the header and for messages."""
        reader = csv.reader((line + "\n" for line in _text_lines(path)), delimiter=separator)
        before = 0
        for fields in reader:
            if fields:
                yield before + 1, fields
            before = reader.line_num

    def where(i: int) -> str:
        return f"{path}:{next(islice(records(), i + 1, None), (0,))[0]}"

    def rows() -> Iterator[Row]:
        import datasets

        header = next(records(), (0, []))[1]
        if not header:
            return
        # All columns as text: guessing types would make 085 into 85 and NA into nothing.
        features = datasets.Features({name: datasets.Value("string") for name in header})
        options = {"sep": separator, "encoding": "utf-8-sig", "keep_default_na": False, "features": features}
        try:
            yield from _stream("csv", path, **options)
        except UserError:
            for line, fields in records():  # which also says which line is not UTF-8
                if len(fields) != len(header):
                    raise UserError(
                        f"{path}:{line}: {len(fields)} field{'s' * (len(fields) != 1)}, but the header has {len(header)}"
                    ) from None
            raise

    return Rows(rows(), where)


def _read_directory(path: Path, subset: str | None, split: str | None, default_splits: tuple[str, ...]) -> Rows:

    note = ""
    try:
        if (path / "dataset_dict.json").exists():
            names = list(json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"])
            chosen, note = _choose_split(names, split, default_splits, str(path))
            return _of_dataset(_saved(path / chosen), f"{path} ({chosen})", note)
        if (path / "state.json").exists():
            return _of_dataset(_saved(path), str(path))
        with tempfile.TemporaryDirectory() as scratch:
            builder, note = _builder(str(path), subset, cache_dir=scratch)
            files: dict[str, list[str]] = {str(name): list(paths) for name, paths in (builder.config.data_files or {}).items()}
            chosen, split_note = _choose_split(list(files), split, default_splits, str(path))
            parts = [Path(name) for name in files[chosen]]
            if saved := next((part.parent for part in parts if part.name in ("state.json", "dataset_info.json")), None):
                raise UserError(f"{path} has data sets that were saved in folders: give each of them, such as {saved}")
            note = _notes(note, split_note, _not_read(path, parts))
            if all(map(file_format, parts)):
                return _chain([_read_file(part) for part in parts], note)
            stream = builder.as_streaming_dataset(split=chosen)  # formats beyond those above
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {_first_line(error)}"
        raise UserError(f"{path}: cannot be read as a dataset directory: {reason}") from error
    return _of_dataset(stream, f"{path} ({chosen})", note)


def _not_read(path: Path, parts: list[Path]) -> str:
    """Returns the files of other formats: ``datasets`` reads those of one format."""
    chosen = set(map(file_format, parts))
    others = [each for each in sorted(path.rglob("*")) if each.is_file() and file_format(each) not in ("", *chosen)]
    names = ", ".join(str(each.relative_to(path)) for each in others[:3])
    return f"not read, because the format differs: {names}{' ...' * (len(others) > 3)}" if others else ""


def _saved(path: Path) -> Iterable[Row]:
    """Reads a directory that ``datasets`` saved. An empty one has no data file, and ``datasets`` cannot load it."""
    import datasets

    if not json.loads((path / "state.json").read_text(encoding="utf-8")).get("_data_files"):
        return ()
    saved: Iterable[Row] = datasets.load_from_disk(str(path))
    return saved


def _chain(parts: list[Rows], note: str) -> Rows:
    """Returns the rows of several files, one after the other."""
    begins: list[int] = []

    def rows() -> Iterator[Row]:
        count = 0
        for part in parts:
            begins.append(count)
            for row in part.rows:
                yield row
                count += 1

    def where(i: int) -> str:
        part = max(index for index, begin in enumerate(begins) if begin <= i)
        return parts[part].where(i - begins[part])

    return Rows(rows(), where, note)


def _builder(name: str, subset: str | None, **options: Any) -> tuple[datasets.DatasetBuilder, str]:
    import datasets

    try:
        return datasets.load_dataset_builder(name, subset, **options), ""
    except ValueError as error:
        known = datasets.get_dataset_config_names(name)
        if subset is None:
            plain = next((each for each in ("default", "main") if each in known), None)
            if plain is None:
                raise UserError(f"{name} has several subsets: set subset to one of {', '.join(known)}") from error
            return datasets.load_dataset_builder(name, plain, **options), f"subset {plain!r} of {', '.join(known)}"
        if subset not in known:
            near = near_matches(subset, known)
            raise UserError(f"{name} has no subset {subset!r}{near}; it has {', '.join(known)}") from error
        raise


def _choose_split(known: list[str], split: str | None, defaults: tuple[str, ...], name: str) -> tuple[str, str]:
    """Returns the split to read and a note about it; ``known`` is in the dataset's own order."""
    known = [str(each) for each in known]
    if split is not None:
        if split not in known:
            raise UserError(f"{name} has no split {split!r}{near_matches(split, known)}; it has {', '.join(known)}")
        return split, ""
    if default := next((default for default in defaults if default in known), None):
        return default, f"split {default!r}"
    raise UserError(f"{name} has no split named {' or '.join(map(repr, defaults))}: set split to one of {', '.join(known)}")


def _stream(kind: str, path: Path, **options: Any) -> Iterator[Row]:
    """Reads a file through ``datasets``, row by row: nothing is copied into its cache, and reading can stop early."""
    import datasets
    import pyarrow

    with tempfile.TemporaryDirectory() as scratch, _quiet():
        try:
            builder = datasets.load_dataset_builder(
                kind, data_files=[escape(str(path.absolute()))], cache_dir=scratch, **options
            )
            yield from plain_rows(builder.as_streaming_dataset(split="train"))
        except Exception as error:
            raise _unreadable(path, error) from error
        finally:
            pyarrow.default_memory_pool().release_unused()


def _text_lines(path: Path) -> Iterator[str]:
    """Yields the file's lines without their ends. Raises ``UserError`` with the line that is not UTF-8."""
    opener: Callable[..., IO[bytes]] = _OPENERS.get(path.suffix.lower(), open)
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                try:
                    yield line.decode("utf-8").rstrip("\r\n")
                except UnicodeDecodeError as error:
                    fault = f"byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line"
                    raise UserError(f"{path}:{number}: not UTF-8: {fault}") from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:  # no permission, a cut or damaged archive
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: cannot be read: {type(error).__name__}: {_first_line(error)}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences ``datasets``, which logs a bad file before raising; the message here tells more."""
    from datasets.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _kind(value: Any) -> str:
    return {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "").rstrip(".")


def _notes(*parts: str) -> str:
    return ", ".join(part for part in parts if part)
