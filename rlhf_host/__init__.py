"""rlhf-host: a minimal host for post-training language models; algorithms, rewards and environments are plugins."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlhf_host.errors import PluginError, RunError, UserError
from rlhf_host.hookspecs import hookimpl
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
from rlhf_host.records.needs import Adjust, Forbid, Needs, Outcome, Output, RoleNeed, RunContext, ScoreContext, Stop
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

if TYPE_CHECKING:
    from rlhf_host.api import Run, evaluate, load_run, replay, rollout, train

__version__ = "0.9.0"

_FROM_API = ("Run", "evaluate", "load_run", "replay", "rollout", "train")

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
    "RoleNeed",
    "Run",
    "RunContext",
    "RunError",
    "Sampling",
    "ScoreContext",
    "Segment",
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
    "train",
]


def __getattr__(name: str) -> Any:
    """Runs from Python, imported when they are first asked for: plugins import this package, and must stay light."""
    if name in _FROM_API:
        return getattr(importlib.import_module("rlhf_host.api"), name)
    raise AttributeError(f"module 'rlhf_host' has no attribute {name!r}")
