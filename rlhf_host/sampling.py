"""Sampling and scoring without training, for packages: arguments of Python functions, sessions, tasks, saved trajectories.

``configured`` makes a run's settings and plugins of ``Arguments``, and ``speaking`` lets errors speak of arguments, not of flags.
``session`` starts the roles; its ``sample``, ``answer``, ``score_again`` and ``experience`` do what a run does with trajectories.
``rlhf_host.runs.read_steps`` reads files of trajectories, ``TrajectoryFile`` writes one; ``RolloutSource`` makes batches of a
run from groups. Importing this loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.arguments import Arguments as Arguments
    from rlhf_host.arguments import configured as configured
    from rlhf_host.arguments import in_arguments as in_arguments
    from rlhf_host.arguments import speaking as speaking
    from rlhf_host.config.check import scoring_refusals as scoring_refusals
    from rlhf_host.records.token_sets import pack_tokens as pack_tokens
    from rlhf_host.records.token_sets import support_trace as support_trace
    from rlhf_host.records.token_sets import unpack_tokens as unpack_tokens
    from rlhf_host.rollouts.collect import Collected as Collected
    from rlhf_host.trackers.records import shorten as shorten
    from rlhf_host.training.inputs import tasks_of as tasks_of
    from rlhf_host.training.picture_files import PictureFiles as PictureFiles
    from rlhf_host.training.records import json_line as json_line
    from rlhf_host.training.records import plain as plain
    from rlhf_host.training.rollout_source import RolloutSource as RolloutSource
    from rlhf_host.training.saved_rows import SavedStep as SavedStep
    from rlhf_host.training.saved_rows import TrajectoryFile as TrajectoryFile
    from rlhf_host.training.saved_rows import decoder as decoder
    from rlhf_host.training.session import session as session

__getattr__, __dir__, __all__ = lazily(__name__)
