"""The formats of data with answers: the columns by which each is recognised, and its reader."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_host import UserError
from rlhf_host.commands import near_matches
from rlhf_host.internals import BESIDE, HISTORY, PICTURES, SYSTEM, Malformed, Origin, as_list, context_of, pictured
from rlhf_host.rendering import has_pictures
from rlhf_rows.examples import (
    Example,
    Read,
    Reading,
    read_alpaca,
    read_generated,
    read_hh,
    read_kto_tag,
    read_messages,
    read_preference,
    read_prompt_completion,
    read_sharegpt,
    read_sharegpt_pair,
    read_stepwise,
    read_text,
    read_tokens,
    read_triple,
    read_unpaired,
)
from rlhf_rows.values import Text
from rlhf_rows.weights import refuse_weights

PAIRS = ("preference", "unpaired")
SINGLE = ("unpaired", "rated")
"""Kinds of answers that are judged one by one: good or bad, which is also 1 or 0."""
QUESTIONS = ("question", "instruction", "input", "query", "problem")
"""Columns that other projects use for the prompts of pairs."""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    columns: str
    """Columns by which people recognise it."""
    kinds: tuple[str, ...]
    """Kinds of ``Needs.data``. A pair can be used if single judgements are needed."""
    recognises: Callable[[Row], bool]
    reader: Read
    own: tuple[str, ...] = ()
    """Columns beside the conversation that the reader reads itself."""

    def read(self, row: Row, reading: Reading) -> Example:
        """Reads a row as an example, with its other columns. Raises ``Malformed`` for content that cannot be honoured."""
        if reading.ignore:
            row = {name: value for name, value in row.items() if name not in reading.ignore}
        example = self.reader(row, reading)
        if example.tokens:  # lists are about them
            refuse_weights({name: value for name, value in row.items() if not isinstance(value, list | tuple)})
            if context_of({name: row[name] for name in PICTURES if name in row}).images:
                raise Malformed("a row of tokens cannot have pictures: give messages (data.ignore leaves the column unread)")
            return example
        refuse_weights(row)
        named = {key.partition(".")[0] for key in (reading.prompt_key, reading.label_key) if key is not None}
        beside = context_of(row, {*named, *self.own, *reading.ignore})
        if not beside:
            return _pictured(example, (), reading.origin)
        if example.own_turns or example.prompt == "":
            names = ", ".join(name for name in row if name in BESIDE and name not in self.own and row[name] is not None)
            raise Malformed(
                f"the texts of the format {self.name} are used as they are, and {names} cannot be added: write that into"
                " the texts, or leave it unread (data.ignore)"
            )
        return replace(_pictured(example, beside.images, reading.origin), beside=beside)


def _pictured(example: Example, images: Sequence[Any], origin: Origin) -> Example:
    """Returns the example with its pictures in the parts of its messages. Raises ``Malformed`` for pictures that cannot be used."""

    def own(text: Text, given: Sequence[Any] = ()) -> Text:
        parts = not isinstance(text, str) and any(has_pictures(message.get("content")) for message in text)
        return pictured(text, given, origin) if parts or given else text

    if example.prompt:
        completions = tuple(own(completion) for completion in example.completions)
        return replace(example, prompt=own(example.prompt, images), completions=completions)
    return replace(example, completions=tuple(own(completion, images) for completion in example.completions))


def _has(row: Row, *columns: str) -> bool:
    return all(row.get(column) is not None for column in columns)


def _begins_as_hh(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("\n\nHuman:")


def _single(row: Row) -> bool:
    return any(_has(row, column) for column in ("label", "kto_tag", "reward"))


FORMATS = (
    Format(
        "messages",
        "messages (role, content)",
        ("prompt_completion",),
        lambda row: not _has(row, "kto_tag") and (_has(row, "messages") or _is_role_list(row.get("conversations"))),
        read_messages,
    ),
    Format(
        "prompt_completion",
        "prompt, completion",
        ("prompt_completion",),
        lambda row: _has(row, "prompt", "completion") and not _single(row),
        read_prompt_completion,
    ),
    Format("text", "text", ("prompt_completion",), lambda row: isinstance(row.get("text"), str), read_text),
    Format(
        "triple",
        "chosen, rejected, reference, and prompt or messages",
        ("triple",),
        lambda row: (
            _has(row, "chosen", "rejected", "reference") and (_has(row, "prompt") or not isinstance(row["chosen"], str))
        ),
        read_triple,
    ),
    Format(
        "preference",
        "chosen, rejected, and prompt or messages",
        PAIRS,
        lambda row: (
            _has(row, "chosen", "rejected")
            and not is_sharegpt(row.get("conversations"))
            and (_has(row, "prompt") or not isinstance(row["chosen"], str))
        ),
        read_preference,
    ),
    Format(
        "hh",
        "chosen and rejected that begin with a blank line and 'Human:'",
        PAIRS,
        lambda row: not _has(row, "prompt") and all(_begins_as_hh(row.get(key)) for key in ("chosen", "rejected")),
        read_hh,
    ),
    Format(
        "unpaired",
        "prompt, completion, label",
        SINGLE,
        lambda row: _has(row, "prompt", "completion", "label"),
        read_unpaired,
    ),
    Format(
        "kto_tag",
        "messages, kto_tag",
        SINGLE,
        lambda row: _has(row, "kto_tag") and (_has(row, "messages") or _has(row, "conversations")),
        read_kto_tag,
    ),
    Format(
        "stepwise",
        "prompt, completions, labels",
        ("stepwise",),
        lambda row: _has(row, "prompt", "completions", "labels"),
        read_stepwise,
    ),
    Format(
        "sharegpt",
        "conversations (from, value)",
        ("prompt_completion",),
        lambda row: is_sharegpt(row.get("conversations")) and not _has(row, "chosen") and not _has(row, "kto_tag"),
        read_sharegpt,
    ),
    Format(
        "sharegpt",
        "conversations, chosen, rejected (from, value)",
        PAIRS,
        lambda row: is_sharegpt(row.get("conversations")) and _has(row, "chosen", "rejected"),
        read_sharegpt_pair,
    ),
    Format(
        "alpaca",
        "instruction, output",
        ("prompt_completion",),
        lambda row: _has(row, "instruction", "output"),
        read_alpaca,
        (*SYSTEM, HISTORY),
    ),
    Format(
        "tokens",
        "prompt_ids and completion_ids, or input_ids and labels",
        ("prompt_completion",),
        lambda row: _has(row, "input_ids") or _has(row, "prompt_ids", "completion_ids"),
        read_tokens,
    ),
    Format(
        "generated",
        "prompt, completion, reward",
        ("prompt_completion", "rated"),
        lambda row: _has(row, "prompt", "completion", "reward"),
        read_generated,
    ),
)
NAMES = tuple(dict.fromkeys(each.name for each in FORMATS))


def is_sharegpt(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, Mapping) and "from" in first and "role" not in first


def _talk_in(row: Row) -> tuple[str, str] | None:
    """Returns a column with a conversation, and the format that reads it."""
    for name, value in row.items():
        if (is_sharegpt(value) or _is_role_list(value)) and _speaker(value[-1]) not in ("user", "human", "system"):
            return name, "sharegpt" if is_sharegpt(value) else "messages"
    return None


def _speaker(message: Any) -> str:
    return str(message.get("role", message.get("from"))).lower() if isinstance(message, Mapping) else ""


def _is_role_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping) and "role" in value[0]


def _with_lists(row: Row) -> Row:
    """Returns the row with conversations in place of texts that contain some."""
    found = {}
    for name in ("messages", "conversations", "prompt", "completion", "chosen", "rejected", "reference"):
        with contextlib.suppress(Malformed):  # that row will say so itself
            found[name] = as_list(row.get(name))
    return {**row, **{name: value for name, value in found.items() if value is not None}}


def likely_kind(rows: Sequence[Row], wanted: str | None, *, split_at: bool = False) -> str | None:
    """Returns the most likely kind of the rows, of ``Needs.data``; None if no format fits them.

    Args:
        rows: the first ones.
        wanted: ``data.format``.
        split_at: True if ``data.split_at`` tells where answers begin.
    """
    rows = list(map(_with_lists, rows))
    if split_at and any(map(_is_text_pair, rows)):
        return PAIRS[0]
    known = [each for each in FORMATS if wanted is None or each.name == wanted]
    counts = [sum(map(each.recognises, rows)) for each in known]
    most = max(counts, default=0)
    return known[counts.index(most)].kinds[0] if most or (wanted and known) else None


def detect(
    rows: Sequence[Row], kind: str, wanted: str | None, *, where: str, split_at: bool = False, needed_by: str = "the algorithm"
) -> tuple[Format, str]:
    """Returns the format of a source and, for people, the reason.

    A requested format is used. Otherwise it is the only one that fits the columns of the first rows and has the data that
    ``kind`` needs.

    Raises ``UserError`` for no format or several, with the nearest ones.

    Args:
        rows: the first ones.
        kind: one of ``Needs.data``.
        wanted: ``data.format``.
        where: the source's name, for messages.
        split_at: True if ``data.split_at`` tells where answers begin.
    """
    accepted = [each for each in FORMATS if kind in each.kinds]
    rows = list(map(_with_lists, rows))
    if wanted is not None:
        return _named(wanted, kind, where, needed_by)
    counts = {id(each): sum(map(each.recognises, rows)) for each in FORMATS}
    if split_at and any(map(_is_text_pair, rows)):
        preference = next(each for each in FORMATS if each.name == "preference")
        counts = {id(preference): sum(map(_is_text_pair, rows))}
    fitting = [each for each in accepted if counts.get(id(each))]
    most = max((counts[id(each)] for each in fitting), default=0)
    fitting = [each for each in fitting if counts[id(each)] == most]
    columns = ", ".join(dict.fromkeys(column for row in rows for column in row)) or "none"
    if len(fitting) == 1:
        return fitting[0], f"it has {fitting[0].columns}"
    if fitting:
        known = _table(fitting)
        raise UserError(f"{where}: columns {columns} can be read in several ways, {known}: choose with --data.format")
    others = [each for each in FORMATS if counts.get(id(each))]
    if others:
        of = " and ".join(dict.fromkeys(kind for each in others for kind in each.kinds))
        raise UserError(
            f"{where}: {needed_by} needs {kind} data; this is {others[0].name} ({others[0].columns}), for algorithms that train"
            f" on {of} data. {kind} data is {_table(accepted)}"
        )
    if "preference" in (name for each in accepted for name in each.kinds) and any(map(_is_text_pair, rows)):
        questions = [name for name in QUESTIONS if any(isinstance(row.get(name), str) for row in rows)]
        way = f"name the column with the prompt, --data.prompt-key {questions[0]}" if questions else "add a column prompt"
        raise UserError(
            f"{where}: chosen and rejected are texts without a prompt: say where the answer begins with --data.split-at TEXT, "
            f"the text before every answer (such as 'Assistant:'), or {way}"
        )
    if kind in ("prompt_completion", "unpaired") and (talk := next(filter(None, map(_talk_in, rows)), None)):
        column, form = talk
        if any(each.name == form for each in accepted):
            raise UserError(f"{where}: {column!r} has conversations: set --data.format {form} --data.prompt-key {column}")
    near = sorted(accepted, key=lambda each: -len(set(each.columns.replace(",", " ").split()) & set(columns.split(", "))))
    raise UserError(
        f"{where}: cannot tell the format of columns {columns}. {needed_by} needs {kind} data: {_table(near[:3])};"
        " rename the columns, or choose with --data.format"
    )


def _named(wanted: str, kind: str, where: str, needed_by: str) -> tuple[Format, str]:
    named = [each for each in FORMATS if each.name == wanted]
    if not named:
        raise UserError(f"data.format {wanted!r} is not known{near_matches(wanted, NAMES)}; known are {', '.join(NAMES)}")
    chosen = [each for each in named if kind in each.kinds]
    if not chosen:
        known = ", ".join(dict.fromkeys(each.name for each in FORMATS if kind in each.kinds))
        raise UserError(f"{where}: {needed_by} needs {kind} data, and data.format {wanted} is none: choose one of {known}")
    return chosen[0], "data.format"


def _table(formats: Sequence[Format]) -> str:
    return "; ".join(f"{each.name} ({each.columns})" for each in formats)


def _is_text_pair(row: Row) -> bool:
    return not _has(row, "prompt") and all(isinstance(row.get(key), str) for key in ("chosen", "rejected"))
