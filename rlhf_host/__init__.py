"""rlhf-host: a minimal host for post-training language models; algorithms, rewards and environments are plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.errors import PluginError, RunError, UserError
from rlhf_host.hookspecs import hookimpl
from rlhf_host.lazily import lazily
from rlhf_host.plugins.python_files import import_file
from rlhf_host.protocols import SyncTarget
from rlhf_host.records.episodes import (
    Action,
    Drop,
    Episode,
    EpisodeFailed,
    Generation,
    Group,
    Message,
    NoRoom,
    Policy,
    Reward,
    Sampling,
    Segment,
    Step,
    Task,
    Trajectory,
    Unjudged,
)
from rlhf_host.records.messages import Reply, ToolCall
from rlhf_host.records.needs import Adjust, Forbid, Needs, Outcome, Output, RoleHandle, RoleNeed, RunContext, ScoreContext, Stop
from rlhf_host.records.tensors import (
    ACTION,
    COMPLETION,
    GROUP_MEAN_TOKEN_MEAN,
    LOSS,
    SEQUENCE_MEAN_TOKEN_MEAN,
    SEQUENCE_MEAN_TOKEN_SUM,
    TOKEN_MEAN,
    Advantages,
    Aggregation,
    Batch,
    Distribution,
    Experience,
    Extra,
    LossTerm,
    Metric,
    Outputs,
)
from rlhf_host.scratch import Scratch

if TYPE_CHECKING:
    from rlhf_host.api import Run, evaluate, load_run, replay, rollout, session, train
    from rlhf_host.runs.directory import RunDirectory
    from rlhf_host.training.session import Session

__version__ = "0.9.0"

_LATER = {
    **dict.fromkeys(("Run", "evaluate", "load_run", "replay", "rollout", "session", "train"), "rlhf_host.api"),
    "RunDirectory": "rlhf_host.runs.directory",
    "Session": "rlhf_host.training.session",
}
"""Name → its module, imported when the name is first asked for: plugins import this package, and must stay light."""

__all__ = [
    "ACTION",
    "COMPLETION",
    "GROUP_MEAN_TOKEN_MEAN",
    "LOSS",
    "SEQUENCE_MEAN_TOKEN_MEAN",
    "SEQUENCE_MEAN_TOKEN_SUM",
    "TOKEN_MEAN",
    "Action",
    "Adjust",
    "Advantages",
    "Aggregation",
    "Batch",
    "Distribution",
    "Drop",
    "Episode",
    "EpisodeFailed",
    "Experience",
    "Extra",
    "Forbid",
    "Generation",
    "Group",
    "LossTerm",
    "Message",
    "Metric",
    "Needs",
    "NoRoom",
    "Outcome",
    "Output",
    "Outputs",
    "PluginError",
    "Policy",
    "Reply",
    "Reward",
    "RoleHandle",
    "RoleNeed",
    "Run",
    "RunContext",
    "RunDirectory",
    "RunError",
    "Sampling",
    "ScoreContext",
    "Scratch",
    "Segment",
    "Session",
    "Step",
    "Stop",
    "SyncTarget",
    "Task",
    "ToolCall",
    "Trajectory",
    "Unjudged",
    "UserError",
    "evaluate",
    "hookimpl",
    "import_file",
    "load_run",
    "replay",
    "rollout",
    "session",
    "train",
]


__getattr__ = lazily(__name__, _LATER)
