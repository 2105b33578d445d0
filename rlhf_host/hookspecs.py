"""The contract between the host and its plugins: every hook, where it runs and what it returns.

*Controller* hooks run on the one instance that owns the plugin's state. *Worker* hooks run on every rank and are pure in
(options, arguments). Hooks marked *one* have at most one implementation in a run. Shapes: ``B`` rows, ``T`` completion tokens.
Hooks grow by new arguments only; an implementation names just those it wants.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from rlhf_host.protocols import SyncTarget
from rlhf_host.records.episodes import Action, Drop, Episode, Group, Policy, Reward, Step, Task, Trajectory
from rlhf_host.records.needs import Needs, Outcome, RunContext, ScoreContext
from rlhf_host.records.tensors import Advantages, Experience, LossItems, Metric, Outputs

if TYPE_CHECKING:
    from torch import Tensor

PROJECT = "rlhf_host"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# --- before and around the run ------------------------------------------------------------------


@hookspec
def needs() -> Needs:
    """What the plugin needs, from its options alone, before any model or file is touched. Controller, merged."""


@hookspec
def run_started(context: RunContext) -> Awaitable[None] | None:
    """The run's roles exist and nothing is sampled yet. Controller, all."""


@hookspec
def run_finished(outcome: Outcome) -> Awaitable[None] | None:
    """The run ended, well or not. Controller, all."""


@hookspec
def load_tasks(split: str, seed: int) -> Iterable[Task | Mapping[str, Any]]:
    """Task sources (``--data NAME``): the tasks of a split; a mapping has ``prompt`` and ``label``. Controller, one."""


# --- agents -------------------------------------------------------------------------------------


@hookspec
def agent_reset(episode: Episode) -> Step | Awaitable[Step]:
    """Begin an episode; ``observation=None`` stands for the task's own prompt. Controller, one per agent name."""


@hookspec
def agent_step(episode: Episode, action: Action) -> Step | Awaitable[Step]:
    """Answer the policy's action; ``done`` ends the episode. May raise ``EpisodeFailed``. Controller, one per agent name."""


@hookspec
def agent_close(episode: Episode) -> Awaitable[None] | None:
    """Release what the episode holds; always called, after failures too. Controller, one per agent name."""


@hookspec
def agent_run(episode: Episode, policy: Policy) -> Awaitable[Sequence[Trajectory]]:
    """For agents that own their loop, instead of reset and step: run one episode. Controller, one per agent name."""


# --- rewards and filters ------------------------------------------------------------------------


@hookspec
def score(
    trajectories: Sequence[Trajectory], context: ScoreContext
) -> Sequence[Reward | float | None] | Awaitable[Sequence[Reward | float | None]]:
    """Judge a finished group: one entry per trajectory, ``None`` where it cannot be judged. Controller, each."""


@hookspec
def keep_group(group: Group) -> bool | Drop:
    """``True``, or ``Drop(reason)`` to leave the group out; the host draws another, bounded. Controller, all must agree."""


@hookspec
def transform_rewards(experience: Experience, rewards: Tensor) -> Tensor:
    """``[B]`` → ``[B]``: clip, normalise, penalise, before any baseline. Controller, chained in ``--with`` order."""


@hookspec
def shape_rewards(experience: Experience) -> Tensor:
    """``[B, T]`` additions to the token rewards, after scoring. Controller, summed."""


@hookspec
def loss_masks(experience: Experience) -> Tensor:
    """``[B, T]`` bool: what stays in the loss and its denominator. Controller, AND."""


# --- the learning signal ------------------------------------------------------------------------


@hookspec
def compute_advantages(experience: Experience) -> Advantages:
    """Advantages and returns, ``[B, T]``, over the whole rollout batch. Controller, one."""


@hookspec
def importance_weights(
    logprobs: Tensor, sampler_logprobs: Tensor, current_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """``[B, T]`` detached weights for the sampler-to-trainer gap, row-wise. Controller or worker, multiplied.

    ``logprobs`` are the trainer's log π_old, ``current_logprobs`` those of this forward (the same with one update per batch);
    both are detached, and where ``mask`` (the action tokens) is false every argument may hold anything.
    """


@hookspec
def make_rows(groups: Sequence[Group]) -> Sequence[Trajectory]:
    """Rows to train on instead of advantages (best of n, pairs). Controller, one."""


@hookspec
def batch_statistics(role: str, outputs: Outputs, batch: Experience) -> Iterable[Metric]:
    """Metrics of a pass without gradient over the optimizer batch, reduced over all ranks into ``batch.stats``. Worker."""


@hookspec
def compute_loss(role: str, outputs: Outputs, batch: Experience) -> LossItems:
    """Unreduced loss terms and metrics of a micro-batch, for every trainable role. Worker, each, flattened."""


# --- weights ------------------------------------------------------------------------------------


@hookspec
def sync_connect(targets: Sequence[SyncTarget]) -> Awaitable[None] | None:
    """Prepare the way from trainer to engines. Controller, one."""


@hookspec
def sync_weights(source: Any, version: int) -> Awaitable[None] | None:
    """Bring the weights of ``source`` (the trainer's actor, ``rlhf_host.weight_sync.access.Source``) to every connected engine,
    which then holds ``version``. Controller, one."""


@hookspec
def sync_close() -> Awaitable[None] | None:
    """Release groups, memory and files. Controller, one."""


# --- reporting and state ------------------------------------------------------------------------


@hookspec
def step_finished(metrics: Mapping[str, float]) -> None:
    """The step's reduced metrics, before the next batch. Controller, all."""


@hookspec
def log_metrics(step: int, metrics: Mapping[str, float]) -> None:
    """Write a step's metrics. Controller, all."""


@hookspec
def log_trajectories(step: int, split: str, trajectories: Sequence[Trajectory]) -> None:
    """Write a step's trajectories. Controller, all."""


@hookspec
def state_dict() -> Mapping[str, Any]:
    """What a checkpoint keeps for this plugin: plain values, lists, dicts and tensors. Controller, each."""


@hookspec
def load_state_dict(state: Mapping[str, Any]) -> None:
    """Take back what ``state_dict`` gave. Controller, each."""


ONE = frozenset({"load_tasks", "compute_advantages", "make_rows", "sync_connect", "sync_weights", "sync_close"})
"""Hooks with at most one implementation in a run."""

PER_AGENT = frozenset({"agent_reset", "agent_step", "agent_close", "agent_run"})
"""Hooks with at most one implementation per agent name."""
