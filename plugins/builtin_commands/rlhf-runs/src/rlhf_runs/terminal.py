"""Curves and values as lines of text."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import plotille
from rich.cells import cell_len
from rich.text import Text

from rlhf_host.commands import visible

Curve = tuple[Sequence[int], Sequence[float]]
"""Steps and values."""
CHARS = 160
LABELS = 11
"""Columns before a plot."""
GAP = "  "
_JOINTS = re.compile(r"(?<=[/_.-])(?=[^\W\d])|(?<=\s)")
"""Places where a cell may be wrapped: between words, and in names behind their punctuation."""


def plot(
    curve: Curve,
    *,
    width: int,
    height: int = 6,
    low: float | None = None,
    high: float | None = None,
    ends: tuple[int, int] | None = None,
) -> list[str]:
    """Returns lines of at most ``width`` columns; ``low`` and ``high`` are the limits of values, and ``ends`` those of steps, for
    plots that are compared.
    """
    steps, values = curve
    first, last = ends or (steps[0], steps[-1])
    low, high = min(values) if low is None else low, max(values) if high is None else high
    if low == high:
        low, high = low - 1, high + 1
    figure = plotille.Figure()
    figure.width, figure.height, figure.with_colors, figure.origin = max(10, width - LABELS - 2), height, False, False
    figure.set_x_limits(min_=first, max_=max(last, first + 1))
    figure.set_y_limits(min_=low, max_=high)
    figure.y_ticks_fkt = lambda value, _: f"{number(value):>{LABELS - 3}}"
    figure.x_ticks_fkt = lambda value, _: ""
    if len(steps) == 1:
        figure.scatter(steps, values, marker="•")
    else:
        figure.plot(steps, values)
    lines = figure.show().splitlines()[1:-2]
    begin = f"step {first}"
    return [*(line.rstrip() for line in lines), " " * LABELS + begin + str(last).rjust(figure.width - len(begin))]


def number(value: float) -> str:
    """Returns a number in at most eight characters, with at least three significant digits."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(
    names: Sequence[str], rows: Sequence[Sequence[str]], width: int, right: Collection[str] = (), whole: Collection[str] = ()
) -> Text:
    """Returns a table of at most ``width`` columns without a broken word; where it would be too wide, a block for each row.

    Args:
        right: columns of numbers.
        whole: columns whose cells are not wrapped, because people copy them.
    """
    cells = [[visible(text) for text in line] for line in (names, *rows)]
    columns = list(zip(*cells, strict=True))
    widths = [max(map(cell_len, column)) for column in columns]
    narrowest = [max(cell_len(part.strip()) for text in column for part in _JOINTS.split(text)) for column in columns]
    narrowest = [most if name in whole else least for name, most, least in zip(names, widths, narrowest, strict=True)]
    room = width - len(GAP) * (len(names) - 1)
    if sum(narrowest) > room:
        return Text("\n".join(line for row in cells[1:] for line in _block(cells[0], row, width)))
    while sum(widths) > room:
        widest = max(range(len(widths)), key=lambda place: (widths[place] > narrowest[place]) * widths[place])
        widths[widest] -= 1
    lines = []
    for row in cells:
        parts = [_wrapped(text, each) for text, each in zip(row, widths, strict=True)]
        for number in range(max(map(len, parts))):
            texts = [part[number] if number < len(part) else "" for part in parts]
            spaces = [" " * (each - cell_len(text)) for text, each in zip(texts, widths, strict=True)]
            padded = [
                space + text if name in right else text + space for name, text, space in zip(names, texts, spaces, strict=True)
            ]
            lines.append(GAP.join(padded).rstrip())
        if row is cells[0]:
            head = len("\n".join(lines))
    told = Text("\n".join(lines))
    told.stylize("dim", 0, head)
    return told


def _block(names: Sequence[str], row: Sequence[str], width: int) -> Iterator[str]:
    yield from _wrapped(f"{names[0]} {row[0]}", width)
    for name, text in zip(names[1:], row[1:], strict=True):
        yield from (f"  {line}" for line in _wrapped(f"{name}: {text}", width - 2))


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for part in _JOINTS.split(text):
        if lines[-1] and cell_len((lines[-1] + part).rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return [line.rstrip() for line in lines]


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
