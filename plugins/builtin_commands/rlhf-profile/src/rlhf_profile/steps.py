"""Steps as people write them: ``3,10-12``."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any


class Steps:
    """A set of steps, kept as ranges.

    Raises ``ValueError`` for what is no list of steps.
    """

    def __init__(self, text: str):
        ranges = [_range(part.strip()) for part in text.split(",")]
        merged: list[tuple[int, int]] = []
        for first, last in sorted(ranges):
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = merged[-1][0], max(last, merged[-1][1])
            else:
                merged.append((first, last))
        self.ranges = tuple(merged)

    def __contains__(self, step: int) -> bool:
        return any(first <= step <= last for first, last in self.ranges)

    def __str__(self) -> str:
        return _written(self.ranges)

    def without(self, steps: Collection[int]) -> str:
        """Returns the other steps, as text; empty: there are none."""
        left: list[tuple[int, int]] = []
        for first, last in self.ranges:
            for step in sorted(step for step in steps if first <= step <= last):
                left += [(first, step - 1)] if first < step else []
                first = step + 1
            left += [(first, last)] if first <= last else []
        return _written(left)

    def outside(self, first: int, last: int) -> str:
        """Returns the steps before ``first`` and after ``last``, as text; empty: there are none."""
        before = [(low, min(high, first - 1)) for low, high in self.ranges if low < first]
        after = [(max(low, last + 1), high) for low, high in self.ranges if high > last]
        return _written([*before, *after])


def as_text(value: Any) -> Any:
    """Returns a number, or a list of numbers and ranges, as a file may have them, in the form of a flag."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return str(value)
    return ",".join(map(str, value)) if isinstance(value, list) else value


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", text)
    if match is None:
        raise ValueError(f"{text!r} is no step: write numbers and ranges, as in 3,10-12")
    first, last = int(match[1]), int(match[2] or match[1])
    if first < 1 or last < first:
        raise ValueError(f"{text!r} has no steps: the first step is 1, and a range begins with its lower end")
    return first, last


def _written(ranges: Iterable[tuple[int, int]]) -> str:
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
