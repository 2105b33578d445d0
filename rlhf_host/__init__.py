"""rlhf-host: a minimal host for post-training language models; algorithms, rewards and environments are plugins."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from rlhf_host.lazily import lazily
from rlhf_host.systems import refuse_others

refuse_others()

if TYPE_CHECKING:
    from rlhf_host.api import Run as Run
    from rlhf_host.api import evaluate as evaluate
    from rlhf_host.api import load_run as load_run
    from rlhf_host.api import session as session
    from rlhf_host.api import train as train
    from rlhf_host.errors import PluginError as PluginError
    from rlhf_host.errors import RunError as RunError
    from rlhf_host.errors import UserError as UserError
    from rlhf_host.hookspecs import hookimpl as hookimpl
    from rlhf_host.plugins.python_files import import_file as import_file
    from rlhf_host.protocols import SyncTarget as SyncTarget
    from rlhf_host.records.episodes import Action as Action
    from rlhf_host.records.episodes import Drop as Drop
    from rlhf_host.records.episodes import Episode as Episode
    from rlhf_host.records.episodes import EpisodeFailed as EpisodeFailed
    from rlhf_host.records.episodes import Generation as Generation
    from rlhf_host.records.episodes import Group as Group
    from rlhf_host.records.episodes import Message as Message
    from rlhf_host.records.episodes import NoRoom as NoRoom
    from rlhf_host.records.episodes import Policy as Policy
    from rlhf_host.records.episodes import Reward as Reward
    from rlhf_host.records.episodes import SampleKey as SampleKey
    from rlhf_host.records.episodes import Sampling as Sampling
    from rlhf_host.records.episodes import Segment as Segment
    from rlhf_host.records.episodes import Step as Step
    from rlhf_host.records.episodes import Task as Task
    from rlhf_host.records.episodes import Trajectory as Trajectory
    from rlhf_host.records.episodes import Unjudged as Unjudged
    from rlhf_host.records.messages import Reply as Reply
    from rlhf_host.records.messages import ToolCall as ToolCall
    from rlhf_host.records.needs import Adjust as Adjust
    from rlhf_host.records.needs import AgentNeeds as AgentNeeds
    from rlhf_host.records.needs import AlgoNeeds as AlgoNeeds
    from rlhf_host.records.needs import CorrectionNeeds as CorrectionNeeds
    from rlhf_host.records.needs import Follow as Follow
    from rlhf_host.records.needs import Forbid as Forbid
    from rlhf_host.records.needs import Needs as Needs
    from rlhf_host.records.needs import Outcome as Outcome
    from rlhf_host.records.needs import Output as Output
    from rlhf_host.records.needs import RewardNeeds as RewardNeeds
    from rlhf_host.records.needs import RoleHandle as RoleHandle
    from rlhf_host.records.needs import RoleNeed as RoleNeed
    from rlhf_host.records.needs import RunContext as RunContext
    from rlhf_host.records.needs import ScoreContext as ScoreContext
    from rlhf_host.records.needs import Stop as Stop
    from rlhf_host.records.pictures import Picture as Picture
    from rlhf_host.records.pictures import Pictured as Pictured
    from rlhf_host.records.tensors import ACTION as ACTION
    from rlhf_host.records.tensors import COMPLETION as COMPLETION
    from rlhf_host.records.tensors import GROUP_MEAN_TOKEN_MEAN as GROUP_MEAN_TOKEN_MEAN
    from rlhf_host.records.tensors import LOSS as LOSS
    from rlhf_host.records.tensors import SEQUENCE_MEAN_TOKEN_MEAN as SEQUENCE_MEAN_TOKEN_MEAN
    from rlhf_host.records.tensors import SEQUENCE_MEAN_TOKEN_SUM as SEQUENCE_MEAN_TOKEN_SUM
    from rlhf_host.records.tensors import TOKEN_MEAN as TOKEN_MEAN
    from rlhf_host.records.tensors import Advantages as Advantages
    from rlhf_host.records.tensors import Aggregation as Aggregation
    from rlhf_host.records.tensors import Batch as Batch
    from rlhf_host.records.tensors import Distribution as Distribution
    from rlhf_host.records.tensors import Experience as Experience
    from rlhf_host.records.tensors import Extra as Extra
    from rlhf_host.records.tensors import LossTerm as LossTerm
    from rlhf_host.records.tensors import Metric as Metric
    from rlhf_host.records.tensors import Outputs as Outputs
    from rlhf_host.records.tensors import PolicyLogprobs as PolicyLogprobs
    from rlhf_host.runs.directory import RunDirectory as RunDirectory
    from rlhf_host.scratch import Scratch as Scratch
    from rlhf_host.training.session import Session as Session

__version__ = "0.10.0"

_of_host, __dir__, __all__ = lazily(__name__)


def __getattr__(name: str) -> Any:
    """Returns a public name, or what an installed package adds to them: the entry points of the group ``rlhf.python``."""
    if name not in __all__ and not name.startswith("_") and entry_points(group="rlhf.python", name=name):
        from rlhf_host.plugins.selection import imported, python_name

        if (info := python_name(name)) is not None:
            return imported(info)
    return _of_host(name)
