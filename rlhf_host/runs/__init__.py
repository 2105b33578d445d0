"""Results that a run left in its directory. Importing this loads no torch; a name that needs it does when it is first used.

``RunDirectory`` reads settings, metrics, trajectories and checkpoints. ``run_model`` finds the model that a path means, and
``model_steps`` the steps that ``RUN@STEP`` can name. ``read_steps`` reads saved trajectories, of a run or a file, as the records
that hooks get. ``around_pictures`` finds the tokens of pictures among those of a prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.config.run_dir import named_run, require_run
    from rlhf_host.data.processor import around_pictures
    from rlhf_host.runs.directory import HEADLINES, RunDirectory, flat
    from rlhf_host.runs.models import RunModel, at_step, model_steps, run_model, run_of
    from rlhf_host.training.checkpoints import refuse_damaged
    from rlhf_host.training.saved_rows import read_steps

_HOME = {
    "HEADLINES": "runs.directory",
    "RunDirectory": "runs.directory",
    "RunModel": "runs.models",
    "around_pictures": "data.processor",
    "at_step": "runs.models",
    "flat": "runs.directory",
    "model_steps": "runs.models",
    "named_run": "config.run_dir",
    "read_steps": "training.saved_rows",
    "refuse_damaged": "training.checkpoints",
    "require_run": "config.run_dir",
    "run_model": "runs.models",
    "run_of": "runs.models",
}
"""Name → its module in ``rlhf_host``, imported when the name is first asked for."""

__all__ = [
    "HEADLINES",
    "RunDirectory",
    "RunModel",
    "around_pictures",
    "at_step",
    "flat",
    "model_steps",
    "named_run",
    "read_steps",
    "refuse_damaged",
    "require_run",
    "run_model",
    "run_of",
]

__getattr__, __dir__ = lazily(__name__, {name: f"rlhf_host.{home}" for name, home in _HOME.items()})
