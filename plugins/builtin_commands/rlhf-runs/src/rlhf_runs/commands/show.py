"""``rlhf show``: one run in the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from rlhf_host import RunDirectory
from rlhf_host.commands import visible
from rlhf_host.runs import HEADLINES
from rlhf_runs.folder import chosen_runs
from rlhf_runs.headline import told
from rlhf_runs.metrics import PLOTTED, in_order
from rlhf_runs.notes import note_of
from rlhf_runs.predicted import time_lines
from rlhf_runs.terminal import age, number, plot, short, table

HELP_GROUP = "Look at runs"

PLOTS = 3
ENDS = 5
"""Number of steps at either end whose mean is shown; of evaluations, one."""


@click.command()
@click.argument("run", metavar="[RUN]", required=False, type=click.Path(path_type=Path))
@click.option("--metric", "metrics", multiple=True, metavar="NAME", help="What to plot; repeatable.")
@click.option(
    "--samples", type=click.IntRange(0), default=2, show_default=True, help="So many of the best answers, and of the worst."
)
def show(run: Path | None, metrics: Sequence[str], samples: int) -> None:
    """Show how a run went: curves, what changed from its start to its end, warnings, best and worst answers of its last step.

    Without RUN it is the newest one in runs/.
    """
    [found] = chosen_runs([] if run is None else [run])
    for name in metrics:
        found.curve(name)  # before anything is printed
    screen = Console(highlight=False)
    for line in _head(found):
        screen.print(Text(visible(line)))
    for name in metrics or _plotted(found):
        screen.print(Text(f"\n{visible(name)}", "bold"))
        screen.print(Text("\n".join(plot(found.curve(name), width=screen.width))))
    if found.curves:
        screen.print()
        screen.print(_changes(found, screen.width))
    for line in found.warnings:
        screen.print(Text(visible(f"Warning: {line}"), "yellow"))
    for line in _samples(found, samples):
        screen.print(Text(visible(line)))
    for line in found.damage:
        screen.print(Text(visible(f"Warning: {line}"), "yellow"))


def _head(run: RunDirectory) -> Iterator[str]:
    settings, about = run.settings, run.about
    of_steps = f" of {run.steps}" if run.steps else ""
    begun = f", begun {age(about['started'])} ago" if "started" in about else ""
    yield f"{run.path}: {run.status} at step {run.step}{of_steps}{begun}"
    if note := note_of(run):
        yield f"note: {note}"
    for name in ("error", "stopped_by"):
        if name in about:
            yield f"{name.replace('_', ' ')}: {about[name]}"
    kinds: dict[str, list[str]] = {}
    for plugin in run.plugins:
        weight = plugin.get("weight")
        kinds.setdefault(plugin["kind"], []).append(plugin["name"] + (f" × {weight:g}" if weight not in (None, 1.0) else ""))
    wanted = ("algo", "reward", "extension", "agent")
    yield "; ".join(f"{kind} {', '.join(kinds[kind])}" for kind in wanted if kind in kinds)
    yield f"model {settings['roles']['actor']['model']}"
    sources = ", ".join(str(source["path"] if isinstance(source, dict) else source) for source in settings["data"]["sources"])
    yield f"data {sources or 'given in Python'}"
    if name := run.headline:
        yield f"{name} at the end: {told(run, name)}"
    yield from time_lines(run)
    if run.draws:
        yield "draws: " + ", ".join(
            f"{count:,} {outcome}" for outcome, count in sorted(run.draws.items(), key=lambda item: -item[1])
        )


def _plotted(run: RunDirectory) -> list[str]:
    names = [name for name in dict.fromkeys((run.headline, *PLOTTED)) if name in run.curves and len(run.curves[name][0]) > 1]
    return [name for name in names if name is not None][:PLOTS]


def _changes(run: RunDirectory, width: int) -> Text:
    names = ["metric", "start", "end", "lowest", "highest"]
    evaluated = [name for name in run.curves if name.startswith("eval/")]
    evaluated.sort(key=lambda name: (name not in HEADLINES, name != "eval/failed/share"))
    rows = []
    for name in [*evaluated[:4], *(name for name in in_order(run.curves) if name not in evaluated)]:
        _, values = run.curves[name]
        means = statistics.fmean(values[:ENDS]), statistics.fmean(values[-ENDS:])
        if name in evaluated:
            means = values[0], values[-1]
        rows.append([name, *map(number, (*means, min(values), max(values)))])
    return table(names, rows, width, right=names[1:])


def _samples(run: RunDirectory, count: int) -> Iterator[str]:
    last = {split: (split, step) for split, step in run.trajectories}
    places = [last[split] for split in ("train", "eval") if split in last] or [*last.values()][-1:]
    if not places or not count:
        return
    found = [(place, _judged(run, place)) for place in places]
    (split, step), rows = next((each for each in found if _differ(each[1])), found[0])
    folder, differ = run.trajectories[split, step].parent, _differ(rows)
    higher = [row for row in rows if row["reward"] > rows[-1]["reward"]] if differ else rows
    best = list({_asked(row): row for row in higher[::-1]}.values())[::-1][:count]
    lower = [row for row in rows if row["reward"] < best[-1]["reward"]] if differ else []
    worst = list({_asked(row): row for row in lower}.values())[-count:]
    if rows and not differ:
        yield ""
        yield f"All {len(rows)} answers of step {step} ({split}) that were saved have the same reward, {number(rows[0]['reward'])}:"
    for name, chosen in ("best " if differ else "", best), ("worst ", worst):
        for row in chosen:
            yield ""
            yield f"{name}answer of step {step} ({split}): reward {number(row['reward'])}, {row.get('length', 0)} tokens"
            yield from (f"  picture {folder / str(image['file'])}" for image in row.get("images") or ())
            yield f"  prompt  {short(row.get('prompt'))}"
            yield f"  answer  {short(row.get('full_text') or row.get('text'))}"
            if row.get("label") is not None:
                yield f"  label   {short(row['label'])}"


def _judged(run: RunDirectory, place: tuple[str, int]) -> list[dict[str, Any]]:
    """Returns the judged answers of a saved step, the best first."""
    return sorted(
        (row for row in run.rows(*place) if isinstance(row.get("reward"), int | float)), key=lambda row: -row["reward"]
    )


def _differ(rows: Sequence[Mapping[str, Any]]) -> bool:
    return bool(rows) and rows[0]["reward"] > rows[-1]["reward"]


def _asked(row: Mapping[str, Any]) -> tuple[str, str]:
    return str(row.get("prompt")), str(row.get("images"))
