"""The sweep in the terminal: settings by their results, what explains the differences, and what failed."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text
from rlhf_runs import number as figure_text
from rlhf_runs import table

from rlhf_host.commands import visible
from rlhf_sweep.results import Results, number
from rlhf_sweep.space import label

MOST = 40
"""Rows of the table; the page has all."""


def show(results: Results) -> None:
    screen = Console(highlight=False)
    names = list(dict.fromkeys(name for row in results.rows for name in row.settings))
    screen.print(Text(visible(f"By {results.by}" if results.by else "No metric is common to all finished runs"), "bold"))
    heads = [*names, "finished", "mean ± s.e.", "lowest", "highest"]
    rows = [
        [
            *(label(row.settings[name]) if name in row.settings else "" for name in names),
            f"{len(row.values)} of {row.planned}" + (f", {row.failed} failed" if row.failed else ""),
            number(row),
            *(figure_text(end(row.values)) if row.values else "-" for end in (min, max)),
        ]
        for row in results.rows[:MOST]
    ]
    if names:
        screen.print(table(heads, rows, screen.width, right={"lowest", "highest"}))
    else:
        screen.print(Text("\n".join(f"{name} {value}" for row in rows for name, value in zip(heads, row, strict=True))))
    if len(results.rows) > MOST:
        screen.print(Text(f"and {len(results.rows) - MOST} more, which the page has"))
    if effects := results.effects():
        screen.print(Text("\nWhich settings matter: share of the variance between runs", "bold"))
        lines = [
            [
                each.name,
                f"{each.share:.0%}",
                f"{each.chance:.0%}",
                ", ".join(f"{text} {figure_text(mean)}" for text, mean, _ in each.levels[:6]) or "by rank",
            ]
            for each in effects
        ]
        screen.print(
            table(["setting", "explains", "noise alone", "means"], lines, screen.width, right={"explains", "noise alone"})
        )
    screen.print()
    for line in results.verdict():
        screen.print(Text(visible(line)))
    for name, error in results.failed:
        screen.print(Text(visible(f"failed: {name}: {error} ({results.folder.log(name)})"), "yellow"))
