"""Units on disk: tokenised once, memory-mapped, and made one by one on demand."""

from __future__ import annotations

import bisect
import copy
import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_host import Picture
from rlhf_host.internals import Numbers, cache_directory, content_hash, counted
from rlhf_host.rendering import Processor
from rlhf_rows.cache import fill_cache
from rlhf_rows.units import Row, Unit

VERSION = 7
"""Part of every key; increases with every change to how rows become units, and to the stored data."""
COLUMNS = ("label", "margin", "reward", "gold")
TOKEN_COLUMNS = ("step",)
MOST_IN_MEMORY = 20_000
"""Number of units of a source from which on they are kept on disk."""
_BATCH = 1000  # rows of an Arrow batch


class StoredUnits(Sequence[Any]):
    """Units of a directory that ``keep_units`` made. They take no memory until they are used."""

    def __init__(self, directory: Path, size: int):
        import pyarrow

        file = pyarrow.ipc.open_file(pyarrow.memory_map(str(directory / "rows.arrow")))
        self._batches = [file.get_batch(number) for number in range(file.num_record_batches)]
        self._ends: list[int] = []
        for batch in self._batches:
            self._ends.append((self._ends[-1] if self._ends else 0) + batch.num_rows)
        self._arrays: dict[tuple[int, str], tuple[Any, Any]] = {}
        """Views of the file's content, by batch and column."""
        self._size, self._numbers = size, range(self._ends[-1] // size if self._ends else 0)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        numbers = self._numbers[index]
        if isinstance(numbers, int):
            first = numbers * self._size
            return Unit(tuple(self._row(first + place) for place in range(self._size)), self._text(first))
        part = copy.copy(self)
        part._numbers = numbers
        return part

    def lengths(self) -> Any:
        """Returns ``[N, R, 2]``: tokens of prompt and completion of each unit's rows."""
        columns = [[np.diff(batch.column(name).offsets) for name in ("prompt", "completion")] for batch in self._batches]
        rows = [np.stack(pair, -1) for pair in columns] or [np.zeros((0, 2), np.int32)]
        return np.concatenate(rows).reshape(-1, self._size, 2)[self._numbers]

    def pictures(self) -> str:
        """Returns a hash of sizes and dates of the pictures' files: another one means that a file has changed or is gone."""
        texts = {text for batch in self._batches for own in batch.column("images").to_pylist() for text in own or ()}
        digest = hashlib.sha256()
        for path in sorted({str(json.loads(text)[3]) for text in texts}):
            name = path.encode("utf-8", "surrogateescape")
            try:
                known = Path(path).stat()
                digest.update(name + f"\0{known.st_size}\0{known.st_mtime_ns}\0".encode())
            except OSError:
                digest.update(name)
        return digest.hexdigest()

    def _place(self, number: int) -> tuple[int, int]:
        """Returns the batch of a row, and its place there."""
        which = bisect.bisect_right(self._ends, number)
        return which, number - (self._ends[which] - self._batches[which].num_rows)

    def _text(self, number: int) -> str:
        which, place = self._place(number)
        return str(self._batches[which].column("text")[place].as_py() or "")

    def _row(self, number: int) -> Row:
        which, place = self._place(number)
        batch = self._batches[which]

        def numbers(name: str, typecode: str) -> Numbers | None:
            column = batch.column(name)
            if column.null_count and not column[place].is_valid:
                return None
            if (which, name) not in self._arrays:
                self._arrays[which, name] = (column.offsets.to_numpy(), column.values.to_numpy())
            ends, tokens = self._arrays[which, name]
            values = Numbers(typecode)
            values.frombytes(tokens[ends[place] : ends[place + 1]].tobytes())
            return values

        edges = numbers("trained", "i") or ()
        columns = {name: value for name in COLUMNS if (value := batch.column(name)[place].as_py()) is not None}
        of_tokens = {name: values for name in TOKEN_COLUMNS if (values := numbers(name, "f")) is not None}
        spans = tuple(zip(edges[::2], edges[1::2], strict=True))
        images = tuple(Picture(*json.loads(text)) for text in batch.column("images")[place].as_py() or ())
        return Row(numbers("prompt", "i") or (), numbers("completion", "i") or (), spans, columns, of_tokens, images)


def unit_lengths(units: Sequence[Unit]) -> Any:
    """Returns ``[N, R, 2]``: tokens of prompt and completion of each unit's rows; all units have equally many rows."""
    if isinstance(units, StoredUnits):
        return units.lengths()
    return np.array([[(len(row.prompt_ids), len(row.completion_ids)) for row in unit.rows] for unit in units])


def find_units(key: str) -> tuple[StoredUnits, dict[str, Any]] | None:
    """Returns the units that an earlier start stored under this key, and its notes about them."""
    directory = _root() / key
    try:
        about = json.loads((directory / "about.json").read_text(encoding="utf-8"))
        units = StoredUnits(directory, about["rows_per_unit"])
        return (units, about) if units.pictures() == about["pictures"] else None
    except (OSError, ValueError, KeyError):  # there is none, or it is damaged
        return None


def keep_units(
    key: str | None, batches: Iterator[Sequence[Unit]], rows_per_unit: int, about: Callable[[], Mapping[str, Any]]
) -> Sequence[Unit]:
    """Returns the units in memory, or on disk under the key if there are many.

    ``about``: returns the notes once all have been made. Raises ``UserError`` if they cannot be written.
    """
    units: list[Unit] = []
    for batch in batches:
        units += batch
        if key is not None and len(units) >= MOST_IN_MEMORY:
            return _store(key, chain([units], batches), rows_per_unit, about)
    return units


def _root() -> Path:
    return cache_directory() / f"units-{VERSION}"


def _store(
    key: str, batches: Iterator[Sequence[Unit]], rows_per_unit: int, about: Callable[[], Mapping[str, Any]]
) -> StoredUnits:
    def fill(directory: Path) -> None:
        _write(directory / "rows.arrow", counted(batches, "tokenising: {task.completed:,.0f} units", len))
        found = StoredUnits(directory, rows_per_unit).pictures()
        text = json.dumps({**about(), "rows_per_unit": rows_per_unit, "pictures": found}, indent=2)
        (directory / "about.json").write_text(text, encoding="utf-8")

    fill_cache(_root() / key, fill, lambda: find_units(key) is not None)
    return StoredUnits(_root() / key, rows_per_unit)


def _write(path: Path, batches: Iterator[Sequence[Unit]]) -> None:
    import pyarrow

    names = ("prompt", "completion", "trained")
    fields = [pyarrow.field(name, pyarrow.list_(pyarrow.int32())) for name in names]
    fields += [pyarrow.field(name, pyarrow.float64()) for name in COLUMNS]
    fields += [pyarrow.field(name, pyarrow.list_(pyarrow.float32())) for name in TOKEN_COLUMNS]
    fields += [pyarrow.field("images", pyarrow.list_(pyarrow.string())), pyarrow.field("text", pyarrow.large_string())]
    schema = pyarrow.schema(fields)

    def lists(values: Iterable[Iterable[int]]) -> Any:
        """Returns an array of lists, made without a Python object per token."""
        ends, all_values = [0], array("i")
        for each in values:
            all_values.extend(each)
            ends.append(len(all_values))
        buffer = pyarrow.Array.from_buffers(pyarrow.int32(), len(all_values), [None, pyarrow.py_buffer(all_values)])
        return pyarrow.ListArray.from_arrays(pyarrow.array(ends, pyarrow.int32()), buffer)

    told = ((row, unit.text if row is unit.rows[0] else "") for units in batches for unit in units for row in unit.rows)
    with pyarrow.ipc.new_file(str(path), schema) as file:
        while both := list(islice(told, _BATCH)):
            batch, texts = zip(*both, strict=True)
            columns = [
                lists(row.prompt_ids for row in batch),
                lists(row.completion_ids for row in batch),
                lists(chain.from_iterable(row.trained) for row in batch),
                *([row.columns.get(name) for row in batch] for name in COLUMNS),
                *([row.token_columns.get(name) for row in batch] for name in TOKEN_COLUMNS),
                [[json.dumps([each.key, each.width, each.height, each.path]) for each in row.images] for row in batch],
                [text or None for text in texts],
            ]
            arrays = [
                values if isinstance(values, pyarrow.Array) else pyarrow.array(values, field.type)
                for values, field in zip(columns, schema, strict=True)
            ]
            file.write_batch(pyarrow.record_batch(arrays, schema=schema))


# --- keys -------------------------------------------------------------------------------------------------------------


def cache_key(path: str, rows: Any, tokenizer: Any, settings: Mapping[str, Any]) -> str | None:
    """Returns a key of everything that the units depend on: another content, tokenizer or setting gives another key.

    Returns None if the content or the tokenizer is not known well enough.
    """
    content = _content(Path(path).expanduser(), rows)
    if content is None or not getattr(tokenizer, "is_fast", False):
        return None
    import tokenizers
    import transformers

    parts = {
        "version": VERSION,
        "content": content,
        "tokenizer": tokenizer.backend_tokenizer.to_str(),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "chat_template": tokenizer.chat_template,
        "libraries": (transformers.__version__, tokenizers.__version__),
        "settings": settings,
        "root": None if rows.root is None else str(rows.root.absolute()),  # pictures may have relative paths
        "processor": Processor.files(tokenizer),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _content(path: Path, rows: Any) -> str | None:
    if not path.exists():  # a dataset of the hub knows its commit
        return rows.fingerprint
    return content_hash(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else content_hash([path])
