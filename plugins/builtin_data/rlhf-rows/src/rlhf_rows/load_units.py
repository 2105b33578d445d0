"""Loading of units from data settings: rows with answers are read, rendered, tokenised and bounded in length."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, TypeAlias

from rlhf_host import UserError
from rlhf_host.installed import PluginInfo
from rlhf_host.internals import BadRows, Malformed, Numbers, Origin, named, open_source, positions_of, share
from rlhf_host.rendering import Processor, for_chat
from rlhf_host.settings import DataConfig, DataSource
from rlhf_rows.conditions import check_condition
from rlhf_rows.encoding import Encoder
from rlhf_rows.examples import Example, Reading
from rlhf_rows.formats import Format, detect
from rlhf_rows.shown import shown
from rlhf_rows.spans import MarkedText, Marker
from rlhf_rows.texts import kept_text
from rlhf_rows.unit_store import cache_key, find_units, keep_units
from rlhf_rows.units import PythonRows, Row, Split, Unit, UnitSet

MOST_BAD = 0.1
"""Share of bad rows above which a source is refused even if they are skipped."""
_FIRST = 20  # rows that settle the format
_BATCH = 256  # a tokenizer's encodings take many times the memory of their ids

ROWS_OF_UNIT = {"preference": 2, "triple": 3}
"""Kind of data → rows of each unit; other kinds have 1."""
_Marked: TypeAlias = tuple[int, list[tuple[MarkedText, ...]], tuple[Row, ...], list[str]]
"""A row's number, the texts of its units or its tokens, and what is kept of each unit (``Unit.text``)."""


def load_units(
    data: DataConfig,
    *,
    kind: str,
    split: Split,
    tokenizer: Any,
    max_tokens: int | None = None,
    rows: PythonRows | None = None,
    needed_by: str = "the algorithm",
    stop_ids: Sequence[int] = (),
    separator: str = "\n",
    texts: bool = False,
) -> UnitSet:
    """Returns the units of all sources, in file order.

    ``max_samples`` of a source takes its first rows; that of ``data`` is shared over the sources by weight. Rows longer than
    ``data.max_tokens`` or ``max_tokens``, whichever is smaller, are cut or left out according to ``data.long_rows``.

    Raises ``UserError`` for data that cannot be found or read, is of another kind, or has a bad row, with its file and line.

    Args:
        kind: one of ``Needs.data`` except ``prompts``.
        max_tokens: the model's context.
        needed_by: plugin that needs this kind of data, for messages.
        stop_ids: further stop tokens of the model.
        separator: the text put after each step of a ``stepwise`` completion.
        texts: units keep what they were read from.
    """
    if not data.sources:
        raise UserError("no data: give --data a file, a directory or a hub name")
    check_condition(data.condition)
    marker = marker_of(data, tokenizer, stop_ids)
    longest = min((limit for limit in (data.max_tokens, max_tokens) if limit is not None), default=None)
    encoder = Encoder(tokenizer, separator)
    loader = _Loader(data, kind, split, tokenizer, marker, encoder, longest, rows or {}, needed_by, texts)
    loaded = {name: loader.load(source, name) for name, source in named(data.sources)}
    report = [f"{name}: {line}" for name, each in loaded.items() for line in each.lines]
    weights = {name: source.weight for name, source in named(data.sources)}
    read = {name: each.units for name, each in loaded.items() if each.units}
    if not read:
        raise UserError(
            f"no rows are left: all are longer than {longest} tokens, which is all that data.max_tokens and the model's context"
            " allow; data.long_rows truncate keeps the beginnings of answers"
        )
    if data.max_samples is not None:
        read = share(read, weights, data.max_samples)
        read = {name: units for name, units in read.items() if units}
    whole = "\0".join(f"{name}\0{len(units)}\0{loaded[name].digest}" for name, units in read.items())
    fingerprint = hashlib.sha256(whole.encode()).hexdigest()
    return UnitSet(read, {name: weights[name] for name in read}, fingerprint, report)


def marker_of(data: DataConfig, tokenizer: Any, stop_ids: Sequence[int] = ()) -> Marker:
    """Returns the marker that tells which tokens of these data are trained. Raises ``UserError`` if the tokenizer lacks
    something that the settings need.
    """
    marker = Marker(
        for_chat(tokenizer, data),
        system_prompt=data.system_prompt,
        template=data.template,
        history=data.history,
        stop_ids=stop_ids,
    )
    if data.hh == "chat" and not marker.chat:
        raise UserError(
            "data.hh is chat, and there is no chat template: leave data.template unset and use a tokenizer with one"
        )
    return marker


class _Digest:
    """A hash of units, in order."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def _add(self, typecode: str, values: Sequence[float]) -> None:
        self._hash.update(struct.pack("<cq", typecode.encode(), len(values)))
        self._hash.update(array(typecode, values).tobytes())

    def add(self, unit: Unit) -> None:
        self._add("q", [len(unit.rows)])
        self._hash.update(unit.text.encode())
        for row in unit.rows:
            self._add("i", row.prompt_ids)
            self._add("i", row.completion_ids)
            self._add("q", list(chain.from_iterable(row.trained)))
            for picture in row.images:
                self._hash.update(f"{picture.key}\0".encode())
            for key, values in sorted({**{key: [value] for key, value in row.columns.items()}, **row.token_columns}.items()):
                self._hash.update(f"{key}\0".encode())
                self._add("d", values)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The units of a source."""

    units: Sequence[Unit]
    digest: str
    lines: list[str]
    """Lines for people."""


@dataclass(slots=True)
class _Counts:
    """Numbers of a source's rows, by outcome."""

    read: int = 0
    left_out: int = 0
    cut: int = 0
    alone: int = 0
    """Turns that are rows of their own."""
    chat: bool = False
    units: int = 0
    prompts: tuple[int, int] = (0, 0)
    """Tokens of the shortest and the longest prompt."""
    first: Row | None = None
    """First unit that was not cut, if there is one."""
    first_cut: bool = False


@dataclass(frozen=True, slots=True)
class _Loader:
    """Loads the units of one split from its sources."""

    data: DataConfig
    kind: str
    split: Split
    tokenizer: Any
    marker: Marker
    encoder: Encoder
    longest: int | None
    """Maximum tokens of prompt and completion."""
    rows: PythonRows
    needed_by: str
    texts: bool

    def load(self, source: DataSource, name: str) -> _Loaded:
        """Returns a source's units, from the cache if they are there."""
        rows = open_source(source, name, self.split, self.rows)
        if isinstance(rows, PluginInfo):
            raise UserError(f"{rows} gives prompts, and {self.needed_by} needs {self.kind} data: give a file or a hub name")
        key = None if source.path in self.rows else cache_key(source.path, rows, self.tokenizer, self._settings(source))
        if key is not None and (known := find_units(key)) is not None:
            units, about = known
            return _Loaded(units, about["digest"], about["lines"])
        return self._read(source, rows, key)

    def _settings(self, source: DataSource) -> dict[str, Any]:
        """Returns everything that the units depend on, except content and tokenizer."""
        data = self.data.model_dump(mode="json", exclude={"sources", "shuffle"})
        longest, kind, separator = self.longest, self.kind, self.encoder.separator
        own = source.model_dump(mode="json", exclude={"name", "weight"})
        ends = sorted(self.marker.stops), self.marker.end
        settings = {
            "data": data,
            "source": own,
            "split": self.split,
            "longest": longest,
            "kind": kind,
            "end": [ends, separator],
        }
        return settings | ({"texts": True} if self.texts else {})

    def _read(self, source: DataSource, rows: Any, key: str | None) -> _Loaded:
        numbered = enumerate(rows.rows)
        first = list(islice(numbered, _FIRST))
        if not first:
            raise UserError(f"{source.path} has no rows")
        prompt_key, label_key = source.prompt_key or self.data.prompt_key, source.label_key or self.data.label_key
        names = {"prompt": prompt_key, "label": label_key}
        how, why = detect(
            [{**row, **{name: row[key] for name, key in names.items() if key is not None and key in row}} for _, row in first],
            self.kind,
            self.data.format,
            where=source.path,
            split_at=self.data.split_at is not None,
            needed_by=self.needed_by,
        )
        if self.data.condition is not None and how.name != "generated":
            raise UserError(
                f"{source.path}: read as {how.name}, and data.condition is for rows with a reward: give data of the format"
                " generated (prompt, completion, reward), or leave it out"
            )
        bad = BadRows(rows.where, stops=self.data.on_bad_row == "stop")
        counts, digest = _Counts(), _Digest()
        most = min((most for most in (source.max_samples, self.data.max_samples) if most is not None), default=None)
        examples = islice(self._examples(chain(first, numbered), how, source, bad, counts, rows), most)

        def batches() -> Iterator[list[Unit]]:
            for units in self._ahead(examples, bad, counts):
                for unit in units:
                    digest.add(unit)
                yield units

        def about() -> dict[str, Any]:
            if len(bad) > MOST_BAD * counts.read:
                raise UserError(f"{source.path}: {_bad_rows(bad, counts.read)}: more than {MOST_BAD:.0%} of the rows")
            origin = "given in Python" if source.path in self.rows else f"from {source.path}"
            note = f", {rows.note}" if rows.note else ""
            lines = list(self._lines(f"{origin}, read as {how.name} ({why}{note})", how, bad, counts))
            return {"digest": digest.hexdigest(), "lines": lines}

        units = keep_units(key, batches(), ROWS_OF_UNIT.get(self.kind, 1), about)
        said = about()
        return _Loaded(units, said["digest"], said["lines"])

    def _examples(
        self,
        rows: Iterator[tuple[int, Any]],
        how: Format,
        source: DataSource,
        bad: BadRows,
        counts: _Counts,
        given: Any,
    ) -> Iterator[_Marked]:
        """Yields the number of each good row, and the texts of its units or its tokens."""
        reading = Reading(
            prompt_key=source.prompt_key or self.data.prompt_key,
            label_key=source.label_key or self.data.label_key,
            split_at=self.data.split_at,
            condition=self.data.condition,
            chat=self.marker.chat,
            vocabulary=len(self.tokenizer),
            hh_chat=self.data.hh == "chat",
            ignore=self.data.ignore,
            origin=Origin(given.root, kept=True, fetch=self.data.fetch_images),
        )
        for index, row in rows:
            counts.read += 1
            try:
                example = how.read(row, reading)
                parts = [example] if example.tokens else self._judgements(example)
                marked = [[] if example.tokens else self.marker.mark(part) for part in parts]
                kept = []
                for part, own in zip(parts, marked, strict=True) if self.texts else ():
                    count = len(example.tokens) or len(own)
                    kept += [kept_text(part, row, given.where(index), number, count) for number in range(count)]
                if example.tokens:
                    yield index, [], example.tokens, kept
                    continue
                units = [unit for own in marked for unit in own]
            except Malformed as fault:
                bad.add(index, fault)
            else:
                counts.chat = counts.chat or units[0][0].chat
                yield index, units, (), kept

    def _ahead(self, examples: Iterator[_Marked], bad: BadRows, counts: _Counts) -> Iterator[list[Unit]]:
        """Yields units, a batch at a time. One thread tokenises while this one reads and writes: tokenizers let other threads
        run meanwhile.
        """
        waiting: deque[Future[list[Unit]]] = deque()
        with ThreadPoolExecutor(1) as thread:
            try:
                while batch := list(islice(examples, _BATCH)):
                    waiting.append(thread.submit(self._units, batch, bad, counts))
                    if len(waiting) > 2:
                        yield waiting.popleft().result()
            except UserError:
                for each in waiting:
                    each.result()  # raises what is wrong with an earlier row
                raise
            for each in waiting:
                yield each.result()

    def _judgements(self, example: Example) -> list[Example]:
        """Returns a pair as two single judgements, if these are needed."""
        if self.kind != "unpaired" or len(example.completions) == 1:
            return [example]
        judged = zip(example.completions, ({"label": 1.0}, {"label": 0.0}), strict=True)
        return [replace(example, completions=(completion,), columns=(label,)) for completion, label in judged]

    def _units(self, batch: Sequence[_Marked], bad: BadRows, counts: _Counts) -> list[Unit]:
        texts = [text for _, units, _, _ in batch for unit in units for text in unit]
        encoded = iter(self.encoder.encode(texts))
        made: list[Unit] = []
        for index, marked, ready, kept in batch:
            rows = [[next(encoded) for _ in unit] for unit in marked] or [[row] for row in ready]
            fault = next((row for unit in rows for row in unit if isinstance(row, Malformed)), None)
            if fault is not None:
                bad.add(index, fault)
                continue
            if self.kind == "prompt_completion" and not ready:
                counts.alone += len(rows) - 1
            for unit, text in zip(rows, kept or [""] * len(rows), strict=True):
                fitting = self._within_limit(tuple(row for row in unit if isinstance(row, Row)), counts)
                if fitting is not None:
                    made.append(replace(fitting, text=text))
                    length = len(fitting.rows[0].prompt_ids)
                    low, high = counts.prompts if counts.units else (length, length)
                    counts.prompts = min(low, length), max(high, length)
                    if counts.first is None or (counts.first_cut and fitting.rows[0] is unit[0]):
                        counts.first, counts.first_cut = fitting.rows[0], fitting.rows[0] is not unit[0]
                    counts.units += 1
        return made

    def _within_limit(self, rows: tuple[Row, ...], counts: _Counts) -> Unit | None:
        """Returns the unit, cut if the settings say so; None if it is too long."""
        limit = self.longest
        if limit is None or all(len(row.prompt_ids) + len(row.completion_ids) <= limit for row in rows):
            return Unit(rows)
        truncates = self.kind == "prompt_completion" if self.data.long_rows == "auto" else self.data.long_rows == "truncate"
        cut = tuple(_cut(row, limit - len(row.prompt_ids)) for row in rows)
        same = len(cut) > 1 and cut[0].completion_ids == cut[1].completion_ids
        whole = any(self._sees_late(row) for row in rows)  # a picture in an answer might be cut
        if not truncates or same or whole or not all(row.trained for row in cut):
            counts.left_out += 1
            return None
        counts.cut += 1
        return Unit(cut)

    def _sees_late(self, row: Row) -> bool:
        """Returns True if the row has pictures after its prompt."""
        tokens = [Processor.of(self.tokenizer).tokens(picture) for picture in row.images]
        return len(positions_of(row.prompt_ids, tokens, [0] * len(tokens))) < len(tokens)

    # --- for people ---------------------------------------------------------------------------------------------------

    def _lines(self, about: str, how: Format, bad: BadRows, counts: _Counts) -> Iterator[str]:
        noun = {"preference": "pairs", "triple": "triples"}.get(self.kind, "rows")
        if self.kind == "unpaired" and "preference" in how.kinds:
            about += ", each pair as two rows, of which the chosen one is desirable"
        span = f"; prompt {counts.prompts[0]} to {counts.prompts[1]} tokens" if counts.units else ""
        manner = "in the tokenizer's chat template" if counts.chat else "as plain text" if how.name != "tokens" else "as tokens"
        yield f"{counts.units:,} {noun} {about}; {manner}{span}"
        if len(bad):
            yield _bad_rows(bad, counts.read)
        if counts.alone:
            yield (f"{counts.alone:,} turns are rows of their own, because the chat template changes them once others follow")
        if counts.cut:
            yield f"cut the end of the answer of {counts.cut:,} {noun} longer than {self.longest} tokens"
        if counts.left_out:
            yield f"left out {counts.left_out:,} {noun} longer than {self.longest} tokens"
        if counts.first is not None:
            yield f"first row, trained tokens in ⟦⟧: {shown(counts.first, self.tokenizer, self.marker)}"


def _cut(row: Row, length: int) -> Row:
    """Returns the row with the first ``length`` tokens of its completion. Nothing is added where it was cut."""
    length = max(length, 0)
    if len(row.completion_ids) <= length:
        return row
    trained = tuple((begin, min(end, length)) for begin, end in row.trained if begin < length)
    columns = {name: values[:length] for name, values in row.token_columns.items()}
    return replace(row, completion_ids=Numbers("i", row.completion_ids[:length]), trained=trained, token_columns=columns)


def _bad_rows(bad: BadRows, read: int) -> str:
    reasons = "; ".join(f"{count:,} × {reason}" for reason, count in bad.reasons.most_common(5))
    return f"left out {len(bad):,} bad row{'s' * (len(bad) != 1)} of {read:,} ({reasons}), the first at {bad.first}"
