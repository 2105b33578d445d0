"""``rlhf replay``: saved trajectories under other plugins."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlhf_host import UserError
from rlhf_host.commands import phase, rlhf, visible
from rlhf_host.settings import CommandLine, SettingsCommand, resolve
from rlhf_samples.checks import check_replay

if TYPE_CHECKING:
    from rlhf_samples.changes import Change, Replay

HELP_GROUP = "Train"

START = {
    "reward": "[ALIAS=]NAME: score again; repeatable (default: rewards stay as saved)",
    "algo": "NAME: compute advantages",
    "with": "[ALIAS=]NAME: filters and changes of rewards; repeatable, in order",
    "rows": "how many trajectories to show, largest changes first (int, default 20; 0: all)",
    "json": "print everything as a JSON object instead of a table",
    "output": "FILE.jsonl: write the trajectories with their new rewards, for rlhf train --from-trajectories",
    "actor.model": "only needed if a plugin uses a role, or texts that the file does not have",
}

ABOUT = """Score saved trajectories again, compute their advantages again, and show what changes. FILE is what rlhf rollout wrote, a
run directory or its trajectories/. Advantages, plugins that ask models, and --output need a file with tokens: one of rlhf rollout,
or of a run with --trajectories.tokens. No model is loaded unless a plugin needs one."""


@click.command(
    cls=SettingsCommand,
    control=("output", "rows", "json"),
    usage="replay FILE [FLAGS]",
    about=ABOUT,
    start=START,
    sections={"roles": "Models"},
    example="replay answers.jsonl --reward math_verifier --algo rloo",
    takes_file=True,
)
def replay(line: CommandLine) -> None:
    """Score saved trajectories again with other plugins; show what changes."""
    if line.file is None:
        raise UserError("no file is given: rlhf replay FILE --reward NAME --algo NAME")
    count = line.number("rows", "20", "how many trajectories to show, as a whole number; 0: all")
    output = line.value("output")
    loaded = line.read(quickstart=False)
    resolved = resolve(loaded.config, loaded.origins, "replay")
    config = resolved.config
    with closing(resolved.plugins()) as manager:
        check_replay(config, manager)
        phase("Loading libraries")
        from rlhf_host.runs import read_steps
        from rlhf_host.sampling import TrajectoryFile
        from rlhf_samples.changes import replay_steps

        file = None if output is None else TrajectoryFile(Path(output))
        texts = output is None and config.algo is None
        replayed = replay_steps(config, manager, read_steps(Path(line.file), texts=texts))
        if file is not None:
            for step in replayed.steps:
                file.add(step)
            file.write()
    if "json" in line.own:
        from rlhf_host.sampling import plain

        shown = {"summary": replayed.summary(), "trajectories": [change.row() for change in replayed.changes]}
        click.echo(json.dumps(plain(shown), indent=2))
    else:
        _print(replayed, count)
        if output is not None:
            click.echo(f"Written to {output}; train on it with {rlhf('train', '--from-trajectories', output)}")


def _print(replayed: Replay, count: int | None) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from rlhf_host.sampling import shorten

    changes = sorted(replayed.changes, key=_interest, reverse=True)
    table = Table(box=None, pad_edge=False)
    for title in ("step", "group", "sample", "answer", "label"):
        table.add_column(title, overflow="fold")
    for title in ("reward", "advantage"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("")
    for change in changes[: count or None]:
        old, new = change.old, change.new
        table.add_row(
            str(change.step),
            Text(visible(old.group_id.rpartition("-")[2])),
            str(old.sample),
            Text(shorten(visible(change.text), 40)),
            Text(shorten(visible(str(old.task.ground_truth)), 16)),
            _pair(old.reward, change.reward),
            _pair(old.advantage, new.advantage),
            Text(shorten(visible(_note(change)), 60)),
        )
    console = Console()
    console.print(table)
    left = len(changes) - len(changes[: count or None])
    if left:
        console.print(f"... and {left} more, which changed no more than these (--rows 0 shows all)")
    console.print()
    summary = Table(box=None, pad_edge=False, show_header=False)
    for name, value in replayed.summary().items():
        text = _pair(value["old"], value["new"]) if isinstance(value, dict) else str(value)
        summary.add_row(Text(visible(name.replace("_", " "))), Text(visible(text)))
    console.print(summary)


def _interest(change: Change) -> tuple[float, float]:
    def gap(old: float | None, new: float | None) -> float:
        return abs(old - new) if old is not None and new is not None else float(old is not new) * 1e9

    return gap(change.old.reward, change.reward), gap(change.old.advantage, change.new.advantage)


def _pair(old: float | None, new: float | None) -> str:
    first, second = ("none" if value is None else f"{value:.3g}" for value in (old, new))
    return first if first == second else f"{first} → {second}"


def _note(change: Change) -> str:
    if change.dropped is not None:
        return f"dropped: {change.dropped}"
    if change.new.reward is None:
        return f"unjudged: {change.new.unjudged_reason}"
    return "not in the loss" if change.masked else ""
