"""The number that a judge's words say."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import regex

SCORE = (
    r"""(?i)score[\s*_"'`>)\]}|]{0,8}+(?:\([^)]*\))?+[\s*_"'`]{0,8}(?:[:=]|[-–—](?=\s))?[\s*_"'`\[|]{0,8}"""
    r"""(?:\((?=[\d.]+\)))?([-+−－–]?(?:\d+(?:\.\d+)?|\.\d+))(?![.,]{0,2}\d|[-–]\d)"""
)
"""``**Score** (0-10): 7``, ``"score": 7``. No part of ``1,000`` or ``0-10`` counts: none is better than a wrong one."""
PATTERN_S = 1.0
MINUS = str.maketrans("−－–", "---")
"""Signs that judges write and ``float`` does not know."""


THOUGHTS = regex.compile(r"(?i)<(/?)(?:think|thinking|thought|reasoning)>|\[(/?)THINK\]")
_OBJECT = regex.compile(r"\{\s*[\"}]|\[\s*[\[{]")
_INSIDE = regex.compile(r"\"(?:[^\"\\]|\\.)*+\"|\"|[\[{]|[\]}]", flags=regex.DOTALL)


def number_in(text: str, pattern: regex.Pattern[str] | None, *, cut: bool = False) -> float | None:
    """The last number that the pattern finds after the judge's thoughts; without a pattern, that of ``_of_json``; or ``None``.

    ``cut``: the text ends too soon, perhaps in the middle of a number, which does not count then.
    """
    text = _after_thoughts(text)
    if pattern is None:
        return _of_json(text)
    if cut:
        text = text.rstrip()
        text = text[: max((match.end() for match in regex.finditer(r"\s", text)), default=0)]
    try:
        found = [match[1] if pattern.groups else match[0] for match in pattern.finditer(text, timeout=PATTERN_S)]
        value = float(found[-1].translate(MINUS))
    except (IndexError, AttributeError, ValueError, TimeoutError):
        return None
    return value if math.isfinite(value) else None


def _after_thoughts(text: str) -> str:
    """What follows the last thoughts; nothing, where they do not end."""
    markers = list(THOUGHTS.finditer(text))
    if not markers:
        return text
    closing = markers[-1][1] or markers[-1][2]
    return text[markers[-1].end() :] if closing else ""


def _of_json(text: str) -> float | None:
    """The ``score`` of the last JSON object that has one, or else the only one inside it; ``None`` where several are inside."""
    for value in reversed(list(_values(text))):
        scores = _scores(value)
        if scores:
            return scores.pop() if len(scores) == 1 else None
    return None


def _values(text: str) -> Iterator[Any]:
    """Each outermost object or list of objects. What looks like one and cannot be read is left out with all that is in it."""
    decoder, position = json.JSONDecoder(), 0
    while start := _OBJECT.search(text, position):
        try:
            value, position = decoder.raw_decode(text, start.start())
            yield value
        except (ValueError, RecursionError):
            position = _end(text, start.start())


def _end(text: str, start: int) -> int:
    """Behind the bracket that closes the one at ``start``; the end of the text, where none does."""
    depth = 0
    for match in _INSIDE.finditer(text, start):
        if match[0] == '"':  # it does not close
            break
        depth += (match[0] in "[{") - (match[0] in "]}")
        if depth == 0:
            return match.end()
    return len(text)


def _scores(value: Any) -> set[float | None]:
    """The score of an object, whatever is in it; of one without, and of a list, those inside. ``None``: it is no number."""
    if isinstance(value, list):
        return set().union(*map(_scores, value))
    if not isinstance(value, dict):
        return set()
    own = [each for key, each in value.items() if key.casefold() == "score"]
    if own:
        return set(map(_number, own))
    return set().union(*map(_scores, value.values()))


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
