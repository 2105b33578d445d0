"""Results that a run left in its directory. Importing this loads no torch; a name that needs it does when it is first used.

``RunDirectory`` reads settings, metrics, trajectories and checkpoints. ``run_model`` finds the model that a path means, and
``model_steps`` the steps that ``RUN@STEP`` can name. ``read_steps`` reads saved trajectories, of a run or a file, as the records
that hooks get. ``around_pictures`` finds the tokens of pictures among those of a prompt. ``figure`` writes a metric with its
95 % interval, and ``beside`` what must be read with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.config.run_dir import named_run as named_run
    from rlhf_host.config.run_dir import require_run as require_run
    from rlhf_host.data.processor import around_pictures as around_pictures
    from rlhf_host.records.figures import beside as beside
    from rlhf_host.records.figures import failed_share as failed_share
    from rlhf_host.records.figures import figure as figure
    from rlhf_host.runs.directory import HEADLINES as HEADLINES
    from rlhf_host.runs.directory import RunDirectory as RunDirectory
    from rlhf_host.runs.directory import flat as flat
    from rlhf_host.runs.models import RunModel as RunModel
    from rlhf_host.runs.models import at_step as at_step
    from rlhf_host.runs.models import model_steps as model_steps
    from rlhf_host.runs.models import run_model as run_model
    from rlhf_host.runs.models import run_of as run_of
    from rlhf_host.training.checkpoints import refuse_damaged as refuse_damaged
    from rlhf_host.training.saved_rows import read_steps as read_steps

__getattr__, __dir__, __all__ = lazily(__name__)
