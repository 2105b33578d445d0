"""``rlhf runs``: the runs in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from rlhf_host import RunDirectory, UserError
from rlhf_runs.terminal import age, cell, number

HELP_GROUP = "Look at runs"

CONFIG, PLUGINS = "config.yaml", "plugins.json"
"""Files that every run directory has."""


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default="runs")
@click.option("--json", "as_json", is_flag=True, help="Print a list of JSON objects instead of a table.")
def runs(folder: Path, as_json: bool) -> None:
    """List the runs in FOLDER (default: runs), the newest last: how far each is, its most important figure, age and size."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; rlhf train writes into runs/ unless --run-dir says otherwise")
    rows = []
    for path in (folder, *sorted(folder.iterdir())):
        has = [(path / name).is_file() for name in (CONFIG, PLUGINS)]
        if not all(has):
            if any(has) and path != folder:
                click.echo(f"left out: {path} has no {PLUGINS if has[0] else CONFIG}: rlhf train writes both", err=True)
            continue
        try:
            run = RunDirectory(path)
            rows.append(_row(run))
        except UserError as error:
            click.echo(f"left out: {error}", err=True)
            continue
        for line in run.damage:
            click.echo(line, err=True)
    rows.sort(key=lambda row: row["started"])
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    if not rows:
        click.echo(f"{folder} has no runs", err=True)
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("run", overflow="fold")
    for name in ("status", "step", "figure", "age", "size"):
        table.add_column(name, justify="left" if name in ("status", "figure") else "right", no_wrap=name != "figure")
    for row in rows:
        step = f"{row['step']}/{row['steps']}" if row["steps"] else str(row["step"])
        figure = "" if row["figure"] is None else f"{row['metric']} {number(row['figure'])}"
        table.add_row(
            cell(row["run"]), cell(str(row["status"])), step, cell(figure), age(row["started"]), decimal(row["bytes"])
        )
    Console(highlight=False).print(table)


def _row(run: RunDirectory) -> dict[str, Any]:
    name = run.headline
    files = [path for path in run.path.rglob("*") if path.is_file() and not path.is_symlink()]
    return {
        "run": run.path.name or str(run.path),
        "path": str(run.path),
        "status": run.status,
        "step": run.step,
        "steps": run.steps,
        "metric": name,
        "figure": run.curve(name)[1][-1] if name else None,
        "started": run.about.get("started", (run.path / CONFIG).stat().st_mtime),
        "bytes": sum(path.stat().st_size for path in files),
    }
