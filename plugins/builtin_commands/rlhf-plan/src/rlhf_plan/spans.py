"""Ranges of seconds: nothing that is predicted is one figure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """A range, and the value in it that is likeliest."""

    low: float
    middle: float
    high: float

    @classmethod
    def total(cls, spans: Iterable[Span]) -> Span:
        each = list(spans)
        return cls(sum(one.low for one in each), sum(one.middle for one in each), sum(one.high for one in each))

    def times(self, factor: float) -> Span:
        return Span(factor * self.low, factor * self.middle, factor * self.high)

    def around(self, error: float) -> Span:
        """Returns the range with an error of this share at either end."""
        return Span(self.low / (1 + error), self.middle, self.high * (1 + error))

    def has(self, value: float) -> bool:
        return self.low <= value <= self.high

    def text(self, form: Callable[[float], str]) -> str:
        low, high = form(self.low), form(self.high)
        return low if low == high else f"{low} to {high}"


def short(value: float) -> str:
    """Returns a number with two digits."""
    if value == 0:
        return "0"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{float(f'{value:.2g}'):g}"


def duration(seconds: float) -> str:
    """Returns seconds with two digits, in the unit that people would take."""
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{short(seconds / size)} {unit}"
    return f"{short(seconds)} s" if seconds >= 0.1 or seconds == 0 else f"{short(1e3 * seconds)} ms"
