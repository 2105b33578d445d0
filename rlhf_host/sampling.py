"""Sampling and scoring without training, for packages: arguments of Python functions, sessions, tasks, saved trajectories.

``configured`` makes a run's settings and plugins of ``Arguments``, and ``speaking`` lets errors speak of arguments, not of flags.
``session`` starts the roles; its ``sample``, ``answer``, ``score_again`` and ``experience`` do what a run does with trajectories.
``rlhf_host.runs.read_steps`` reads files of trajectories, ``TrajectoryFile`` writes one. Importing this loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.arguments import Arguments, configured, speaking
    from rlhf_host.config.check import scoring_refusals
    from rlhf_host.rollouts.collect import Collected
    from rlhf_host.trackers.records import shorten
    from rlhf_host.training.inputs import tasks_of
    from rlhf_host.training.picture_files import PictureFiles
    from rlhf_host.training.records import json_line, plain
    from rlhf_host.training.saved_rows import SavedStep, TrajectoryFile, check_vocabulary, decoder
    from rlhf_host.training.session import session

_NAMES = {
    "arguments": ["Arguments", "configured", "speaking"],
    "config.check": ["scoring_refusals"],
    "rollouts.collect": ["Collected"],
    "trackers.records": ["shorten"],
    "training.inputs": ["tasks_of"],
    "training.picture_files": ["PictureFiles"],
    "training.records": ["json_line", "plain"],
    "training.saved_rows": ["SavedStep", "TrajectoryFile", "check_vocabulary", "decoder"],
    "training.session": ["session"],
}
"""Module in ``rlhf_host``, imported when one of its names is first asked for → these names."""

_HOME = {name: f"rlhf_host.{home}" for home, names in _NAMES.items() for name in names}

__all__ = [
    "Arguments",
    "Collected",
    "PictureFiles",
    "SavedStep",
    "TrajectoryFile",
    "check_vocabulary",
    "configured",
    "decoder",
    "json_line",
    "plain",
    "scoring_refusals",
    "session",
    "shorten",
    "speaking",
    "tasks_of",
]

__getattr__, __dir__ = lazily(__name__, _HOME)
