"""Models of a run's steps that packages have: ``protocols.StepModels``, by entry points in ``rlhf.step_models``."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from pathlib import Path

from rlhf_host.directories import cache_directory, unwritable_cache
from rlhf_host.errors import blaming
from rlhf_host.plugins.discovery import PluginInfo, unchosen
from rlhf_host.plugins.selection import imported
from rlhf_host.protocols.step_models import StepModels
from rlhf_host.scratch import Scratch

_WRITTEN: dict[tuple[Path, int], Scratch] = {}
"""Run and step → the model's directory, which this process wrote and removes."""


def saved_steps(run: Path) -> list[int]:
    """Returns the steps whose models packages can write. Raises ``RunError`` for a package that fails."""
    return sorted({step for _, _, steps in _packages(run) for step in steps})


def written_model(run: Path, step: int) -> Path | None:
    """Returns the model's directory, written by the first package that has it and removed when the process ends; None: no
    package has it.

    Raises:
        UserError: it cannot be written.
        RunError: a package failed.
    """
    key = run.absolute(), step
    if key in _WRITTEN:
        return _WRITTEN[key].path
    for info, package, steps in _packages(run):
        if step in steps:
            root = cache_directory() / "steps"
            try:
                root.mkdir(parents=True, exist_ok=True)
                scratch = Scratch("step-", root)
            except OSError as error:
                raise unwritable_cache(root, error) from error
            atexit.register(scratch.close)
            try:
                with blaming(str(info), "write"):
                    package.write(run, step, scratch.path)
            except BaseException:
                scratch.close()
                raise
            _WRITTEN[key] = scratch
            return scratch.path
    return None


def _packages(run: Path) -> Iterator[tuple[PluginInfo, StepModels, list[int]]]:
    """Yields what is installed, with the steps that it has."""
    for info in unchosen("step_model"):
        package: StepModels = imported(info)
        with blaming(str(info), "steps"):
            steps = [int(step) for step in package.steps(run)]
        yield info, package, steps
