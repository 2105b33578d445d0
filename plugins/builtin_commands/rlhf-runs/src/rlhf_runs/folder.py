"""Runs of a folder, and which of them a command means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from rlhf_host import RunDirectory, UserError

RUNS = Path("runs")
"""Folder in which rlhf train writes, unless --run-dir says otherwise."""
CONFIG, PLUGINS = "config.yaml", "plugins.json"
"""Files that every run directory has."""


def runs_in(folder: Path) -> list[RunDirectory]:
    """Returns the runs in a folder and the folder itself if it is one, the newest last. What is left out is said on stderr."""
    return sorted(_readable(folder), key=begun)


def begun(run: RunDirectory) -> float:
    """Returns the time at which a run began, in seconds since 1970."""
    return float(run.about.get("started", (run.path / CONFIG).stat().st_mtime))


def chosen_runs(paths: Sequence[Path], count: int = 1) -> list[RunDirectory]:
    """Returns the runs that are named, or where none is the newest ones, which is said on stderr.

    Args:
        count: number of runs that a command takes where none is named.

    Raises:
        UserError: one is no run, or there are too few.
    """
    if paths:
        return [RunDirectory(path) for path in paths]
    newest = runs_in(RUNS)[-count:] if RUNS.is_dir() else []
    if len(newest) < count:
        has = "no runs" if not newest else f"only the run {newest[0].path.name}"
        raise UserError(f"no run is named, and {RUNS}/ has {has}: name a run directory (rlhf runs FOLDER lists them)")
    said = " and ".join(str(run.path) for run in newest)
    click.echo(f"no run is named: {said} {'is the newest' if count == 1 else 'are the newest'}", err=True)
    return newest


def _readable(folder: Path) -> Iterator[RunDirectory]:
    for path in (folder, *sorted(folder.iterdir())):
        has = [(path / name).is_file() for name in (CONFIG, PLUGINS)]
        if not all(has):
            if any(has) and path != folder:
                click.echo(f"left out: {path} has no {PLUGINS if has[0] else CONFIG}: rlhf train writes both", err=True)
            continue
        try:
            run = RunDirectory(path)
            _ = run.settings
        except UserError as error:
            click.echo(f"left out: {error}", err=True)
            continue
        yield run
