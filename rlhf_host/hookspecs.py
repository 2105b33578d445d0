"""The contract between the host and its plugins: every hook, where it runs and what becomes of its results.

*Controller* hooks run on the one instance that owns the plugin's state. *Worker* hooks run on every rank and are pure in
(options, arguments). Shapes: ``B`` rows, ``T`` completion tokens. Hooks grow by new arguments only; an implementation names just
those it wants.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import pluggy

from rlhf_host.protocols import SyncTarget, WeightSource
from rlhf_host.records.episodes import Action, Drop, Episode, Group, Policy, Reward, Step, Task, Trajectory, Unjudged
from rlhf_host.records.needs import Adjust, Needs, Outcome, RunContext, ScoreContext, Stop
from rlhf_host.records.tensors import Advantages, Batch, Experience, LossItems, Metric, Outputs

if TYPE_CHECKING:
    from torch import Tensor

PROJECT = "rlhf_host"
hookimpl = pluggy.HookimplMarker(PROJECT)
_mark = pluggy.HookspecMarker(PROJECT)
_Function = TypeVar("_Function", bound=Callable[..., Any])

Calls: TypeAlias = Literal["one", "each", "all", "chained", "summed", "and", "multiplied"]


@dataclass(frozen=True, slots=True)
class HookRule:
    """How the host calls a hook: of whom, where, and on which thread."""

    calls: Calls
    """``one``: at most one plugin has it. ``each``: every answer counts by itself. ``all``: all are told. The rest: how the answers
    become one, in the order of selection."""
    where: Literal["controller", "worker"] = "controller"
    per: Literal["run", "agent"] = "run"
    """What ``one`` is meant of."""
    threaded: bool = False
    """Implementations that are no coroutines run in a pool of threads: they may wait."""


RULES: dict[str, HookRule] = {}
"""Every hook's rule, in the order of the contract."""


def hookspec(
    *,
    calls: Calls,
    where: Literal["controller", "worker"] = "controller",
    per: Literal["run", "agent"] = "run",
    threaded: bool = False,
) -> Callable[[_Function], _Function]:
    """Mark a function as the specification of a hook; ``function.rule`` keeps what is said here."""

    def mark(function: _Function) -> _Function:
        function.rule = RULES[function.__name__] = HookRule(calls, where, per, threaded)  # type: ignore[attr-defined]
        return _mark(function)

    return mark


# --- before and around the run ------------------------------------------------------------------


@hookspec(calls="each")
def needs() -> Needs:
    """What the plugin needs, from its options alone, before any model or file is touched."""


@hookspec(calls="all")
def run_started(context: RunContext) -> Awaitable[None] | None:
    """The run's roles exist and nothing is sampled yet."""


@hookspec(calls="all")
def run_finished(outcome: Outcome) -> Awaitable[None] | None:
    """The run ended, well or not."""


@hookspec(calls="each")
def load_tasks(split: str, seed: int) -> Iterable[Task | Mapping[str, Any]]:
    """Task sources (``--data NAME``), called once for each source of that name: the tasks of a split; a mapping has ``prompt`` and
    ``label``.

    A list or tuple is read whole, checked and filtered. Another sequence is indexed as tasks are drawn. An iterator is read as
    tasks are drawn, in its own order (``data.shuffle`` plays no part); a resumed run skips what was drawn, unless the plugin has
    a ``state_dict`` of its own.
    """


@hookspec(calls="one")
def draw_tasks(tasks: Sequence[Task], count: int, step: int) -> Sequence[int | Task]:
    """Which tasks come next, instead of the seed's order: ``count`` indices into ``tasks``, or tasks of the plugin's own.

    Called again in a step where filters dropped groups. ``state_dict`` is taken before the step, and put back when the step is
    interrupted, so that a resumed run draws the same.
    """


# --- agents -------------------------------------------------------------------------------------


@hookspec(calls="one", per="agent", threaded=True)
def agent_reset(episode: Episode) -> Step | Awaitable[Step]:
    """Begin an episode; ``observation=None`` stands for the task's own prompt."""


@hookspec(calls="one", per="agent", threaded=True)
def agent_step(episode: Episode, action: Action) -> Step | Awaitable[Step]:
    """Answer the policy's action; ``done`` ends the episode. May raise ``EpisodeFailed``."""


@hookspec(calls="one", per="agent", threaded=True)
def agent_close(episode: Episode) -> Awaitable[None] | None:
    """Release what the episode holds; always called, after failures too."""


@hookspec(calls="one", per="agent", threaded=True)
def agent_run(episode: Episode, policy: Policy) -> Awaitable[Sequence[Trajectory]]:
    """For agents that own their loop, instead of reset and step: run one episode.

    Every sampled token is an action in at most one of the rows; a row may name the row that it branched from.
    """


# --- rewards and filters ------------------------------------------------------------------------


@hookspec(calls="each", threaded=True)
def score(
    trajectories: Sequence[Trajectory], context: ScoreContext
) -> Sequence[Reward | float | Unjudged | None] | Awaitable[Sequence[Reward | float | Unjudged | None]]:
    """Judge a finished group: one entry per trajectory, ``Unjudged(reason)`` or ``None`` where it cannot be judged."""


@hookspec(calls="and")
def keep_group(group: Group) -> bool | Drop:
    """``True``, or ``Drop(reason)`` to leave the group out; the host draws another, bounded."""


@hookspec(calls="chained")
def transform_rewards(experience: Experience, rewards: Tensor) -> Tensor:
    """``[B]`` → ``[B]``: clip, normalise, penalise, before any baseline."""


@hookspec(calls="summed")
def shape_rewards(experience: Experience) -> Tensor:
    """``[B, T]`` additions to the token rewards, after scoring."""


@hookspec(calls="and")
def loss_masks(experience: Experience) -> Tensor:
    """``[B, T]`` bool: what stays in the loss and its denominator."""


# --- the learning signal ------------------------------------------------------------------------


@hookspec(calls="one")
def compute_advantages(experience: Experience) -> Advantages:
    """Advantages and returns, ``[B, T]``, over the whole rollout batch."""


@hookspec(calls="each")
def prepare_batch(experience: Experience) -> Mapping[str, Tensor | float] | None:
    """What this plugin's worker hooks must see beside the batch: it goes to ``batch.extra[alias]``, and is ``batch.own`` in them.
    After advantages and masks; tensors with ``B`` rows are sliced with the batch."""


@hookspec(calls="multiplied", where="worker")
def importance_weights(
    old_logprobs: Tensor,
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    versions: Tensor,
    version: int,
) -> Tensor:
    """``[B, T]`` or ``[B]`` detached weights for the sampler-to-trainer gap, row-wise, for the loss terms marked ``corrected``.

    ``old_logprobs`` are the trainer's log π_old and ``logprobs`` those of this forward (the same with one update per batch), both
    detached; ``versions`` ``[B, T]`` sampled the tokens, and the step began with ``version``. Where ``mask`` (the action tokens) is
    false every tensor may hold anything. Terms of ``[B]`` take weights of ``[B]`` only; weights that no term takes are an error.
    """


@hookspec(calls="one")
def make_rows(groups: Sequence[Group]) -> Sequence[Trajectory]:
    """Rows to train on instead of advantages (best of n, pairs). Provisional: no run calls it yet."""


@hookspec(calls="each", where="worker")
def batch_statistics(role: str, outputs: Outputs, batch: Batch) -> Iterable[Metric]:
    """Metrics of a pass without gradient over the optimizer batch, reduced over all ranks into ``batch.stats``."""


@hookspec(calls="each", where="worker")
def compute_loss(role: str, outputs: Outputs, batch: Batch) -> LossItems:
    """Unreduced loss terms and metrics of a micro-batch, for every trainable role."""


# --- weights ------------------------------------------------------------------------------------


@hookspec(calls="one")
def sync_connect(targets: Sequence[SyncTarget]) -> Awaitable[None] | None:
    """Prepare the way from trainer to engines."""


@hookspec(calls="one")
def sync_weights(source: WeightSource, version: int) -> Awaitable[None] | None:
    """Bring the weights of ``source`` (the trainer's actor) to every connected engine, which then holds ``version``."""


@hookspec(calls="one")
def sync_close() -> Awaitable[None] | None:
    """Release groups, memory and files."""


# --- reporting and state ------------------------------------------------------------------------


@hookspec(calls="all")
def step_finished(step: int, metrics: Mapping[str, float]) -> Stop | Adjust | None:
    """The reduced metrics of a step of training, before the next batch. ``Stop(reason)`` ends the run after it, cleanly;
    ``Adjust({"actor.lr": 1e-6, "kl.coef": 0.02})`` holds from the next step on, and through checkpoints."""


@hookspec(calls="each")
def adjust(settings: Mapping[str, float]) -> None:
    """Take what another plugin's ``Adjust`` brings for this one: ``ALIAS.NAME`` arrives as ``NAME``. Raise ``UserError`` for a name
    or value that cannot be; what holds on belongs into ``state_dict``."""


@hookspec(calls="all")
def log_metrics(step: int, metrics: Mapping[str, float]) -> None:
    """Write a step's metrics."""


@hookspec(calls="all")
def log_trajectories(step: int, split: str, trajectories: Sequence[Trajectory]) -> None:
    """Write a step's trajectories."""


@hookspec(calls="each")
def state_dict() -> Mapping[str, Any]:
    """What a checkpoint keeps for this plugin: plain values, lists, dicts and tensors."""


@hookspec(calls="each")
def load_state_dict(state: Mapping[str, Any]) -> None:
    """Take back what ``state_dict`` gave."""
