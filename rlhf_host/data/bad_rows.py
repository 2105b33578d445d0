"""Problems of rows, reported with their place or counted; and lookup of values in rows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_host.errors import UserError, near_matches

LONGEST_TEXT = 1_000_000
"""Maximum characters of a text in a message. A tokenizer takes seconds and hundreds of megabytes for longer ones."""


class Malformed(Exception):
    """A problem of a row, or of the ``whole`` source; the place is added by the caller that knows it."""

    def __init__(self, problem: str, whole: bool = False):
        super().__init__(problem)
        self.whole = whole


@dataclass(slots=True)
class BadRows:
    """Collection of rows that were left out, or the error for the first of them."""

    where: Callable[[int], str]
    stops: bool
    first: str = ""
    first_index: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return self.reasons.total()

    @property
    def summary(self) -> str:
        """What was left out, for the line about a source; empty: nothing."""
        count = len(self)
        return f"; left out {count} bad row{'s' * (count != 1)}, the first at {self.first}" if count else ""

    def add(self, index: int, fault: Malformed) -> None:
        """Counts a row. Raises ``UserError`` with its place if bad rows end the run, or if the whole source is at fault."""
        place = f"{self.where(index)}: {fault}"
        if self.stops or fault.whole:
            raise UserError(place if fault.whole else f"{place} (data.on_bad_row skip leaves such rows out)") from None
        if not self.first or index < self.first_index:  # rows may be found out of order
            self.first, self.first_index = place, index
        self.reasons[re.sub(r"[\d,]*\d", "N", str(fault))] += 1


MISSING = object()


def look_up(row: Mapping[str, Any], key: str) -> Any:
    """Returns the column, or the value that a dotted path leads to: ``reward_model.ground_truth``. Returns ``MISSING`` if there
    is none.
    """
    if key in row:
        return row[key]
    head, dot, rest = key.partition(".")
    inner = row.get(head) if dot else None
    return look_up(inner, rest) if isinstance(inner, Mapping) else MISSING


def get(row: Mapping[str, Any], key: str, meaning: str) -> Any:
    if (value := look_up(row, key)) is MISSING:
        columns = f"; the row has {','.join(row)}" if row else "; the row is empty"
        raise Malformed(f"no {key!r} (the {meaning}){near_matches(key, row) or columns}")
    return value


def check_text(text: str, key: str) -> None:
    if len(text) > LONGEST_TEXT:
        raise Malformed(f"{key!r} has {len(text):,} characters, more than {LONGEST_TEXT:,}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Malformed(f"{key!r} has half a character, {text[error.start]!a}: no tokenizer can read it") from None


def kind_of(value: Any) -> str:
    names = {type(None): "null", list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)
