"""``rlhf plugins requirements``: exact versions, to reproduce a run."""

from __future__ import annotations

from pathlib import Path

import click

from rlhf_host import UserError
from rlhf_host.installed import discover, extras_of_host, pinned
from rlhf_host.runs import require_run

FILE = "requirements.txt"
"""The file in a run directory."""


@click.command()
@click.argument("run_dir", required=False, type=click.Path(path_type=Path))
def requirements(run_dir: Path | None) -> None:
    """Print exact versions (name==version) for pip: the host, plugins, torch and all their dependencies.

    With RUN_DIR, these are the versions at the start of that run; without it, those installed now. To install them:
    rlhf plugins requirements RUN_DIR > requirements.txt; pip install -c dist/wheels.txt -r requirements.txt
    """
    if run_dir is None:
        click.echo(pinned(sorted({info.distribution for info in discover()}), extras_of_host()), nl=False)
        return
    run_dir = require_run(run_dir).parent
    try:
        click.echo((run_dir / FILE).read_text(encoding="utf-8"), nl=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{run_dir / FILE} cannot be read ({error}): the versions of this run are not known") from error
