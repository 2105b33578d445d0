"""``rlhf compare``: runs beside each other in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from rlhf_host import RunDirectory, UserError
from rlhf_host.commands import visible
from rlhf_host.runs import beside, figure
from rlhf_runs.folder import chosen_runs
from rlhf_runs.headline import last_row
from rlhf_runs.metrics import PLOTTED, in_order
from rlhf_runs.names import names_of
from rlhf_runs.notes import note_of
from rlhf_runs.terminal import number, plot, short, table
from rlhf_runs.used import UNTOLD, used_settings, written
from rlhf_runs.usual import usual_settings

HELP_GROUP = "Look at runs"

PLOTS = 2
POINTS = 6
"""Steps in a table of values."""
NARROWEST = 36


@click.command()
@click.argument("runs", metavar="[RUN RUN...]", nargs=-1, type=click.Path(path_type=Path))
@click.option("--metric", "metrics", multiple=True, metavar="NAME", help="What to compare; repeatable.")
@click.option("--prompts", type=click.IntRange(0), default=2, show_default=True, help="So many prompts that all runs answered.")
def compare(runs: Sequence[Path], metrics: Sequence[str], prompts: int) -> None:
    """Compare runs: settings that differ, curves with the same limits, and answers to the same prompts.

    Without RUN they are the newest two in runs/.
    """
    if len(runs) == 1:
        raise UserError(f"rlhf compare takes two runs or more, and {runs[0]} is one: rlhf show {runs[0]} shows it")
    found = chosen_runs(runs, 2)
    names = names_of([run.path for run in found])
    for run in found:
        for name in metrics:
            run.curve(name)  # before anything is printed
    screen = Console(highlight=False)
    screen.print(_settings(found, names, screen.width))
    for name in metrics or _compared(found):
        screen.print(Text(f"\n{visible(name)}", "bold"))
        for lines in _plots(found, names, name, screen.width):
            screen.print(Text(lines))
        screen.print(_values(found, names, name, screen.width))
    for line in _answers(found, names, prompts):
        screen.print(Text(visible(line)))
    for line in (line for run in found for line in run.damage):
        screen.print(Text(visible(f"Warning: {line}"), "yellow"))


def _settings(runs: Sequence[RunDirectory], names: Sequence[str], width: int) -> Text:
    rows = [["status", *(f"{run.status} at step {run.step}" for run in runs)]]
    notes = [note_of(run) for run in runs]
    if any(notes):
        rows.append(["note", *notes])
    each = [{name: value for name, value in used_settings(run).items() if value != {}} for run in runs]
    usual = cache(usual_settings)  # which loads plugins
    for name in dict.fromkeys(name for settings in each for name in settings):
        values = [settings.get(name) for settings in each]
        plugin = f"{name.rpartition('.')[0]}.name"
        of_some = name != plugin and 0 < sum(plugin in settings for settings in each) < len(each)
        told = not of_some or any(
            value is not None and value != usual(run).get(name) for value, run in zip(values, runs, strict=True)
        )
        if name not in UNTOLD and told and any(value != values[0] for value in values):
            rows.append([name, *(written(value) or "-" for value in values)])
    return table(["setting", *names], rows, width)


def _compared(runs: Sequence[RunDirectory]) -> list[str]:
    """Returns the most telling metrics that all runs have."""
    wanted = dict.fromkeys(name for name in (*(run.headline for run in runs), *PLOTTED, *in_order(runs[0].curves)) if name)
    return [name for name in wanted if all(name in run.curves for run in runs)][:PLOTS]


def _plots(runs: Sequence[RunDirectory], names: Sequence[str], metric: str, width: int) -> Iterator[str]:
    curves = [run.curve(metric) for run in runs]
    low, high = (end(value for _, values in curves for value in values) for end in (min, max))
    ends = min(steps[0] for steps, _ in curves), max(steps[-1] for steps, _ in curves)
    beside = min(len(runs), max(1, width // NARROWEST))
    for first in range(0, len(runs), beside):
        blocks = []
        for name, curve in list(zip(names, curves, strict=True))[first : first + beside]:
            lines = [visible(name), *plot(curve, width=width // beside - 1, low=low, high=high, ends=ends)]
            blocks.append([line.ljust(width // beside) for line in lines])
        yield "\n".join("".join(parts).rstrip() for parts in zip(*blocks, strict=True))


def _values(runs: Sequence[RunDirectory], names: Sequence[str], metric: str, width: int) -> Text:
    """Returns values at steps that all have, and at the last step of each."""
    curves = [dict(zip(*run.curve(metric), strict=True)) for run in runs]
    common = sorted({*curves[0]}.intersection(*curves[1:]))
    count = min(POINTS, len(common))
    steps = [common[round(place * (len(common) - 1) / max(1, count - 1))] for place in range(count)]
    rows = [[str(step), *(number(curve[step]) for curve in curves)] for step in steps]
    lasts = [last_row(run, metric) for run in runs]
    rows.append(["last", *(figure(row, metric, ".3g") for row in lasts)])
    if any(said := [beside(row, metric) for row in lasts]):
        rows.append(["of which", *(text or "-" for text in said)])
    head = ["step", *names]
    return table(head, rows, width, right=head)


def _answers(runs: Sequence[RunDirectory], names: Sequence[str], count: int) -> Iterator[str]:
    """Yields answers of the last step of each run that has any of the same tasks, evaluations first, and before others those to
    which the runs got different rewards."""
    for split in ("eval", "train"):
        answers = []
        for run in runs:
            steps = [step for kind, step in run.trajectories if kind == split]
            last = steps[-1] if steps else None
            rows = [] if last is None else run.rows(split, last)
            found: dict[Any, tuple[int | None, dict[str, Any]]] = {}
            for row in rows:
                found.setdefault((row.get("source"), row.get("task"), str(row.get("prompt"))), (last, row))
            answers.append(found)
        common = [key for key in answers[0] if all(key in other for other in answers[1:])] if count else []
        common.sort(key=lambda key: len({found[key][1].get("reward") for found in answers}) == 1)  # the others keep their order
        for key in common[:count]:
            yield ""
            yield f"prompt ({split}, label {answers[0][key][1].get('label')})  {short(key[2])}"
            for name, found in zip(names, answers, strict=True):
                step, row = found[key]
                reward = "unjudged" if row.get("reward") is None else f"reward {number(row['reward'])}"
                yield f"  {name}, step {step}, {reward}: {short(row.get('full_text') or row.get('text'))}"
        if common:
            return
