"""``rlhf report``: runs as one page for a browser."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from rlhf_host import UserError
from rlhf_host.commands import write_file
from rlhf_runs.folder import chosen_runs
from rlhf_runs.names import names_of

HELP_GROUP = "Look at runs"


@click.command()
@click.argument("runs", metavar="[RUN...]", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--output",
    "-o",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    default="report.html",
    show_default=True,
    help="The page.",
)
def report(runs: Sequence[Path], output: Path) -> None:
    """Write one page with curves, answers, settings and versions of the runs. It needs no network and no server.

    Without RUN it is the newest one in runs/.
    """
    from rlhf_runs.report import page

    found = chosen_runs(runs)
    if not output.parent.is_dir():
        raise UserError(f"--output {output}: there is no directory {output.parent}")
    if output.is_file() and not _is_page(output):
        raise UserError(f"{output} exists, and is no page: remove it, or choose another --output")
    text, notices = page(found, names_of([run.path for run in found]))
    write_file(output, text.encode())
    for notice in notices:
        click.echo(notice, err=True)
    click.echo(f"wrote {output.resolve()} ({output.stat().st_size / 1e6:.1f} MB): open it in a browser")


def _is_page(file: Path) -> bool:
    """Returns True for a page, which a newer one may replace."""
    with file.open("rb") as start:
        return start.read(15).lower() == b"<!doctype html>"
