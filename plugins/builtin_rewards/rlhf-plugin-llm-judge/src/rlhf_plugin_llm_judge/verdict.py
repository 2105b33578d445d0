"""The number in a judge's answer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import regex

SCORE = (
    r"""(?i)score[\s*_"'`>)\]}|]{0,8}+(?:\([^)]*\))?+[\s*_"'`]{0,8}(?:[:=]|[-–—](?=\s))?[\s*_"'`\[|]{0,8}"""
    r"""(?:\((?=[\d.]+\)))?([-+−－–]?(?:\d+(?:\.\d+)?|\.\d+))(?![.,]{0,2}\d|[-–]\d)"""
)
"""Pattern of a score: ``**Score** (0-10): 7``, ``"score": 7``. No part of ``1,000`` or ``0-10`` counts: no number is better
than a wrong one.
"""
PATTERN_S = 1.0
MINUS = str.maketrans("−－–", "---")
"""Minus signs that judges write and ``float`` does not know."""


THOUGHTS = regex.compile(r"(?i)<(/?)(?:think|thinking|thought|reasoning)>|\[(/?)THINK\]")
_OBJECT = regex.compile(r"\{\s*[\"}]|\[\s*[\[{]")
_INSIDE = regex.compile(r"\"(?:[^\"\\]|\\.)*+\"|\"|[\[{]|[\]}]", flags=regex.DOTALL)


def number_in(text: str, pattern: regex.Pattern[str] | None, *, cut: bool = False) -> float | None:
    """Returns the last number that the pattern finds after the judge's thoughts; without a pattern, that of ``_of_json``; or
    None.

    ``cut``: the text was cut, perhaps in the middle of a number, which then does not count.
    """
    text = after_thoughts(text)
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


def after_thoughts(text: str) -> str:
    """Returns the text after the last thoughts; nothing if they do not end."""
    markers = list(THOUGHTS.finditer(text))
    if not markers:
        return text
    closing = markers[-1][1] or markers[-1][2]
    return text[markers[-1].end() :] if closing else ""


def _of_json(text: str) -> float | None:
    """Returns the ``score`` of the last JSON object that has one, or else the only one inside it; None if several are inside."""
    for value in reversed(list(values(text))):
        scores = _scores(value)
        if scores:
            return scores.pop() if len(scores) == 1 else None
    return None


def values(text: str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Iterator[Any]:
    """Yields each outermost object or list of objects. Text that looks like one but cannot be read is left out with everything
    in it.
    """
    decoder, position = json.JSONDecoder(object_pairs_hook=pairs), 0
    while start := _OBJECT.search(text, position):
        try:
            value, position = decoder.raw_decode(text, start.start())
            yield value
        except (ValueError, RecursionError):
            position = _end(text, start.start())


def _end(text: str, start: int) -> int:
    """Returns the position after the bracket that closes the one at ``start``; the end of the text if none does."""
    depth = 0
    for match in _INSIDE.finditer(text, start):
        if match[0] == '"':  # it does not close
            break
        depth += (match[0] in "[{") - (match[0] in "]}")
        if depth == 0:
            return match.end()
    return len(text)


def _scores(value: Any) -> set[float | None]:
    """Returns the score of an object, whatever is in it; of an object without one, and of a list, those inside. None: not a
    number.
    """
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
