"""Alternatives and ranges over which a setting is varied, and how both are written."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_host import UserError

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(?::(lin|log))?(?::(\d+))?")
_DIGITS = 6
"""Significant digits of the numbers that a range is divided into."""
FORMS = "A,B,C, LOW..HIGH (whole numbers), LOW..HIGH:lin:COUNT or LOW..HIGH:log:COUNT"


@dataclass(frozen=True, slots=True)
class Choices:
    """Alternatives: texts as flags have them, numbers, and mappings or lists as files have them."""

    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers between two ends, to draw from. ``whole``: only whole ones."""

    low: float
    high: float
    log: bool
    whole: bool


Space = Choices | Range


@dataclass(frozen=True, slots=True)
class Varied:
    """One setting and what it is varied over. ``where`` names the flag, or file and line."""

    name: str
    where: str
    space: Space


def read_text(text: str, where: str) -> Space:
    """Returns what ``A,B,C`` or ``LOW..HIGH`` means. Raises ``UserError`` for anything else."""
    if (found := _range(text, where)) is not None:
        return found
    items = [_item(part, where) for part in _split(text, where)]
    return choices(items, where)


def read_value(value: Any, where: str) -> Space:
    """Returns the same for a value of a file: a list, or a text with a range."""
    if isinstance(value, list):
        return choices(value, where)
    if isinstance(value, str) and (found := _range(value, where)) is not None:
        return found
    raise UserError(f"{where}: give a list of alternatives, or a range as text, such as 1e-6..1e-4:log:4, not {value!r}")


def choices(items: Sequence[Any], where: str) -> Choices:
    """Returns these alternatives. Raises ``UserError`` if there are none, or one is there twice."""
    if not items:
        raise UserError(f"{where}: there is nothing to vary over: give {FORMS}")
    names = [label(item) for item in items]
    if twice := next((name for place, name in enumerate(names) if name in names[:place]), None):
        raise UserError(f"{where}: {twice} is there twice: leave one out")
    return Choices(tuple(items))


def whole_numbers(text: str, where: str) -> list[int]:
    """Returns seeds: ``0,1,2`` or ``0..2``. Raises ``UserError`` for anything else, and for one that is there twice."""
    ends = re.fullmatch(r"(\d+)\.\.(\d+)", text.strip())
    numbers = text.split(",") if ends is None else []
    if ends is not None and int(ends[2]) - int(ends[1]) >= 1_000_000:
        raise UserError(f"{where} {text}: more than a million seeds")
    seeds = [*range(int(ends[1]), int(ends[2]) + 1)] if ends else [int(each) for each in numbers if each.strip().isdecimal()]
    if not seeds or len(seeds) < len(numbers):
        raise UserError(f"{where} {text}: seeds are whole numbers, such as 0,1,2 or 0..2")
    if len(set(seeds)) < len(seeds):
        twice = next(seed for place, seed in enumerate(seeds) if seed in seeds[:place])
        raise UserError(f"{where} {text}: seed {twice} is there twice: the second run would be a copy and no further evidence")
    return seeds


def label(value: Any) -> str:
    """Returns an alternative in few words; numbers in one form, however they were written."""
    if isinstance(value, str):
        return _plain_number(value) or value
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        return " ".join([value["name"], *(f"{key}={label(item)}" for key, item in value.items() if key != "name")])
    return json.dumps(value, ensure_ascii=False)


def _plain_number(text: str) -> str:
    if not re.fullmatch(_NUMBER, text):
        return ""
    return str(int(text)) if re.fullmatch(r"[+-]?\d+", text) else json.dumps(float(text))


def _range(text: str, where: str) -> Space | None:
    """Returns a range, if the text is one."""
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        return None
    low, high, log, whole = float(match[1]), float(match[2]), match[3] == "log", _are_whole(match[1], match[2])
    said = f"{where} {text}"
    if not (math.isfinite(low) and math.isfinite(high)) or low >= high:
        raise UserError(f"{said}: a range goes from a lower number to a higher one")
    if log and low <= 0:
        raise UserError(f"{said}: a logarithmic range begins above 0")
    if match[4] is None:
        if match[3] is None and not whole:
            raise UserError(f"{said}: say how it is divided: {match[1]}..{match[2]}:lin:COUNT, or :log:COUNT")
        if match[3] is None:
            if high - low >= 1_000_000:
                raise UserError(f"{said}: more than a million values: {match[1]}..{match[2]}:lin:COUNT takes some")
            return Choices(tuple(range(int(low), int(high) + 1)))
        return Range(low, high, log, whole)
    if (count := int(match[4])) < 2 or count > 1_000_000:
        raise UserError(f"{said}: a range has 2 values or more, its ends among them, and at most a million")
    return Choices(tuple(_divided(low, high, count, log)))


def _are_whole(*texts: str) -> bool:
    return all(re.fullmatch(r"[+-]?\d+", text) for text in texts)


def _divided(low: float, high: float, count: int, log: bool) -> Iterator[float | int]:
    for place in range(count):
        share = place / (count - 1)
        exact = low * (high / low) ** share if log else low + (high - low) * share
        value = float(f"{low if place == 0 else high if place == count - 1 else exact:.{_DIGITS}g}")
        yield int(value) if value.is_integer() and abs(value) < 2**53 else value


def _split(text: str, where: str) -> list[str]:
    """Returns the parts between commas that are in no bracket and no quotes."""
    parts, depth, quoted, escaped = [""], 0, False, False
    for letter in text:
        if quoted:
            quoted, escaped = quoted if letter != '"' or escaped else False, letter == "\\" and not escaped
        elif letter == '"' and (depth or not parts[-1].strip()):
            quoted = True
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        if letter == "," and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += letter
    if depth or quoted:
        raise UserError(f"{where} {text}: a bracket or a quote is not closed")
    if not all(part.strip() for part in parts):
        raise UserError(f"{where} {text}: an alternative is empty: give {FORMS}")
    return [part.strip() for part in parts]


def _item(text: str, where: str) -> Any:
    """Returns a text as it is, and JSON as what it says, so that lists, mappings and texts with commas can be alternatives."""
    if text[0] not in '[{"':
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f'{where}: {text} is not JSON ({error}): a list is ["a", "b"], a mapping {{"name": "grpo"}}') from None
