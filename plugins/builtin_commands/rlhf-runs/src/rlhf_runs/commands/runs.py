"""``rlhf runs``: the runs in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.filesize import decimal

from rlhf_host import RunDirectory, UserError
from rlhf_host.runs import failed_share
from rlhf_runs.folder import RUNS, begun, runs_in
from rlhf_runs.headline import last_row, told
from rlhf_runs.notes import NOTE, note_of, write_note
from rlhf_runs.terminal import age, short, table

HELP_GROUP = "Look at runs"


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default=RUNS)
@click.option(
    "--note",
    type=(click.Path(path_type=Path), str),
    metavar="RUN TEXT",
    help=f"Only write a note about a run, which tables and pages show: {NOTE} in the run directory. An empty one removes it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a list of JSON objects instead of a table.")
def runs(folder: Path, note: tuple[Path, str] | None, as_json: bool) -> None:
    """List the runs in FOLDER (default: runs), the newest last: how far each is, its most important figure, age and size."""
    if note is not None:
        run = RunDirectory(folder / note[0] if (folder / note[0]).is_dir() else note[0])
        write_note(run, note[1])
        click.echo(f"{run.path / NOTE}: {'written' if note[1].strip() else 'removed'}")
        return
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; rlhf train writes into runs/ unless --run-dir says otherwise")
    found = runs_in(folder)
    rows = [_row(run) for run in found]
    for line in (line for run in found for line in run.damage):
        click.echo(line, err=True)
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    if not rows:
        click.echo(f"{folder} has no runs", err=True)
        return
    lines = []
    for row in rows:
        step = f"{row['step']}/{row['steps']}" if row["steps"] else str(row["step"])
        figure = "" if row["figure"] is None else f"{row['metric']} {row['told']}"
        lines.append([row["run"], str(row["status"]), step, figure, age(row["started"]), decimal(row["bytes"])])
    names = ["run", "status", "step", "figure", "age", "size"]
    if any(row["note"] for row in rows):
        names.append("note")
        lines = [[*line, short(row["note"])] for line, row in zip(lines, rows, strict=True)]
    screen = Console(highlight=False)
    screen.print(table(names, lines, screen.width, right=("step", "age", "size"), whole=("run",)))


def _row(run: RunDirectory) -> dict[str, Any]:
    name = run.headline
    files = [path.stat() for path in run.path.rglob("*") if path.is_file() and not path.is_symlink()]
    sizes = {(file.st_dev, file.st_ino): file.st_size for file in files}  # the final weights have two names
    return {
        "run": run.path.name or str(run.path),
        "path": str(run.path),
        "status": run.status,
        "step": run.step,
        "steps": run.steps,
        "metric": name,
        "figure": run.curve(name)[1][-1] if name else None,
        "told": told(run, name) if name else "",
        "failed": failed_share(last_row(run, name), name) if name else 0.0,
        "started": begun(run),
        "bytes": sum(sizes.values()),
        "note": note_of(run),
    }
