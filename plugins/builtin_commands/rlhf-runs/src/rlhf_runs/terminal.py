"""Curves and values as lines of text."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import plotille
from rich.text import Text

from rlhf_host.commands import visible

Curve = tuple[Sequence[int], Sequence[float]]
"""Steps and values."""
CHARS = 160
LABELS = 11
"""Columns before a plot."""


def plot(curve: Curve, *, width: int, height: int = 6, low: float | None = None, high: float | None = None) -> list[str]:
    """Returns lines of at most ``width`` columns; ``low`` and ``high`` are the limits, for plots that are compared."""
    steps, values = curve
    low, high = min(values) if low is None else low, max(values) if high is None else high
    if low == high:
        low, high = low - 1, high + 1
    figure = plotille.Figure()
    figure.width, figure.height, figure.with_colors, figure.origin = max(10, width - LABELS - 2), height, False, False
    figure.set_x_limits(min_=steps[0], max_=max(steps[-1], steps[0] + 1))
    figure.set_y_limits(min_=low, max_=high)
    figure.y_ticks_fkt = lambda value, _: f"{number(value):>{LABELS - 3}}"
    figure.x_ticks_fkt = lambda value, _: ""
    if len(steps) == 1:
        figure.scatter(steps, values, marker="•")
    else:
        figure.plot(steps, values)
    lines = figure.show().splitlines()[1:-2]
    first, last = f"step {steps[0]}", str(steps[-1])
    return [*(line.rstrip() for line in lines), " " * LABELS + first + last.rjust(figure.width - len(first))]


def number(value: float) -> str:
    """Returns a number in at most eight characters, with at least three significant digits."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def cell(text: str) -> Text:
    """Returns a text for a table as it is: rich would read words in square brackets as styles."""
    return Text(visible(text))


def short(value: Any) -> str:
    """Returns one line of a text, with its head and tail."""
    text = " ".join(str(value).split())
    return text if len(text) <= CHARS else f"{text[: CHARS * 2 // 3]} … {text[-CHARS // 3 :]}"


def age(then: float, now: float | None = None) -> str:
    """Returns the time that has passed since then."""
    seconds = max(0.0, (time.time() if now is None else now) - then)
    for unit, of_unit in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= of_unit:
            return f"{seconds / of_unit:.0f} {unit}"
    return f"{seconds:.0f} s"
