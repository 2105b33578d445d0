"""rlhf-host: a minimal host for post-training language models; algorithms, rewards and environments are plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.api import Run, evaluate, load_run, session, train
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
        SampleKey,
        Sampling,
        Segment,
        Step,
        Task,
        Trajectory,
        Unjudged,
    )
    from rlhf_host.records.messages import Reply, ToolCall
    from rlhf_host.records.needs import (
        Adjust,
        AgentNeeds,
        AlgoNeeds,
        CorrectionNeeds,
        Follow,
        Forbid,
        Needs,
        Outcome,
        Output,
        RewardNeeds,
        RoleHandle,
        RoleNeed,
        RunContext,
        ScoreContext,
        Stop,
    )
    from rlhf_host.records.pictures import Picture, Pictured
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
        PolicyLogprobs,
    )
    from rlhf_host.runs.directory import RunDirectory
    from rlhf_host.scratch import Scratch
    from rlhf_host.training.given_rows import GivenRows, read_rows
    from rlhf_host.training.session import Session

__version__ = "0.10.0"

_HOMES = {
    "rlhf_host.api": "Run evaluate load_run session train",
    "rlhf_host.errors": "PluginError RunError UserError",
    "rlhf_host.hookspecs": "hookimpl",
    "rlhf_host.plugins.python_files": "import_file",
    "rlhf_host.protocols": "SyncTarget",
    "rlhf_host.records.episodes": (
        "Action Drop Episode EpisodeFailed Generation Group Message NoRoom Policy Reward SampleKey Sampling Segment Step Task "
        "Trajectory Unjudged"
    ),
    "rlhf_host.records.messages": "Reply ToolCall",
    "rlhf_host.records.needs": (
        "Adjust AgentNeeds AlgoNeeds CorrectionNeeds Follow Forbid Needs Outcome Output RewardNeeds RoleHandle RoleNeed RunContext "
        "ScoreContext Stop"
    ),
    "rlhf_host.records.pictures": "Picture Pictured",
    "rlhf_host.records.tensors": (
        "ACTION COMPLETION GROUP_MEAN_TOKEN_MEAN LOSS SEQUENCE_MEAN_TOKEN_MEAN SEQUENCE_MEAN_TOKEN_SUM TOKEN_MEAN "
        "Advantages Aggregation Batch Distribution Experience Extra LossTerm Metric Outputs PolicyLogprobs"
    ),
    "rlhf_host.runs.directory": "RunDirectory",
    "rlhf_host.scratch": "Scratch",
    "rlhf_host.training.given_rows": "GivenRows read_rows",
    "rlhf_host.training.session": "Session",
}
"""Module → the names that are imported from it when one is first asked for: plugins and commands import this package, and must
stay light."""

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
    "AgentNeeds",
    "Aggregation",
    "AlgoNeeds",
    "Batch",
    "CorrectionNeeds",
    "Distribution",
    "Drop",
    "Episode",
    "EpisodeFailed",
    "Experience",
    "Extra",
    "Follow",
    "Forbid",
    "Generation",
    "GivenRows",
    "Group",
    "LossTerm",
    "Message",
    "Metric",
    "Needs",
    "NoRoom",
    "Outcome",
    "Output",
    "Outputs",
    "Picture",
    "Pictured",
    "PluginError",
    "Policy",
    "PolicyLogprobs",
    "Reply",
    "Reward",
    "RewardNeeds",
    "RoleHandle",
    "RoleNeed",
    "Run",
    "RunContext",
    "RunDirectory",
    "RunError",
    "SampleKey",
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
    "read_rows",
    "session",
    "train",
]

__getattr__, __dir__ = lazily(__name__, {name: module for module, names in _HOMES.items() for name in names.split()})
