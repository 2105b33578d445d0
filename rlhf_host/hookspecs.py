"""The contract between the host and its plugins: every hook, where it runs and how its results are used.

*Controller* hooks run on the one instance that has the plugin's state. *Worker* hooks run on every rank and depend only on options
and arguments. Shapes: ``B`` rows, ``T`` completion tokens. A hook may get new arguments; an implementation names only those that it
uses.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import pluggy

from rlhf_host.records.episodes import Action, Drop, Episode, Group, Policy, Reward, Step, Task, Trajectory, Unjudged
from rlhf_host.records.needs import Adjust, Needs, Outcome, RunContext, ScoreContext, Stop
from rlhf_host.records.tensors import Advantages, Batch, Experience, LossItems, LossTerm, Metric, Outputs, PolicyLogprobs

if TYPE_CHECKING:
    from torch import Tensor, nn

PROJECT = "rlhf_host"
hookimpl = pluggy.HookimplMarker(PROJECT)
_mark = pluggy.HookspecMarker(PROJECT)
_Function = TypeVar("_Function", bound=Callable[..., Any])

Calls: TypeAlias = Literal["one", "each", "all", "chained", "summed", "and", "multiplied"]


class Items:
    """A list, or another ordered iterable: of these types, or of items that are checked when they are used.

    Args:
        named: name of the items in messages.
    """

    def __init__(self, named: str, *types: type):
        self.named, self.types = named, types

    def __str__(self) -> str:
        return f"a list of {self.named}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HookRule:
    """Rule by which the host calls a hook: for which plugins, where, and on which thread."""

    calls: Calls
    """``one``: at most one plugin implements it. ``each``: every result is used on its own. ``all``: all plugins are called. The
    others say how results are combined, in the order of selection."""
    where: Literal["controller", "worker"] = "controller"
    per: Literal["run", "agent"] = "run"
    """Thing that ``one`` refers to."""
    threaded: bool = False
    """Implementations that are not coroutines run in a thread pool, so they may block."""
    awaited: bool = False
    """True if it may be a coroutine, or return another awaitable; threaded ones may too."""
    ahead: bool = False
    """True if, with ``async_depth``, it is called for later batches beside the steps; so plugins with a state are refused
    there.
    """
    gives: tuple[type | str | Items | None, ...] = ()
    """Allowed answers: types, ``None``, items, and tensors over the hook's batch, by shape. Empty: anything."""

    @property
    def reads(self) -> bool:
        """True if an answer that comes one by one must be read to be checked."""
        return any(isinstance(kind, Items) and kind.types for kind in self.gives)

    def __call__(self, function: _Function) -> _Function:
        """Mark a function as the specification of a hook with this rule, ``function.rule``."""
        function.rule = RULES[function.__name__] = self  # type: ignore[attr-defined]
        return _mark(function)


hookspec = HookRule
RULES: dict[str, HookRule] = {}
"""Every hook's rule, in the order of the contract."""


# --- before and around the run ------------------------------------------------------------------


@hookspec(calls="each", gives=(Needs, None))
def needs() -> Needs:
    """Return the plugin's needs. They depend only on its options; called before any model or file is touched."""


@hookspec(calls="all")
def check_run(config: Mapping[str, Any], tokenizers: Mapping[str, Any]) -> None:
    """Raise ``UserError`` for a run that the plugin cannot take part in, as far as settings and tokenizers tell. Called before
    data is read and models are loaded, also by ``--dry-run``. A role's tokenizer is loaded on first use.
    """


@hookspec(calls="all", awaited=True)
def run_started(context: RunContext) -> Awaitable[None] | None:
    """Called when the run's roles exist, before anything is sampled."""


@hookspec(calls="all", awaited=True)
def run_finished(outcome: Outcome) -> Awaitable[None] | None:
    """Called when the run ends, also after a failure."""


@hookspec(calls="each", ahead=True, gives=(Items("tasks"), None))
def load_tasks(split: str, seed: int) -> Iterable[Task | Mapping[str, Any]]:
    """For task sources (``--data NAME``): return the tasks of a split. A mapping has ``prompt`` and ``label``. Called once for each
    source of that name.

    A list or tuple is read completely, checked and filtered. Another sequence is indexed when a task is drawn. An iterator is read
    when a task is drawn, in its own order (``data.shuffle`` has no effect). A resumed run skips the tasks that were drawn before,
    unless the plugin has ``state_dict``.
    """


@hookspec(calls="each", gives=(Mapping, None))
def check_labels(tasks: Sequence[Task]) -> Mapping[int, str] | None:
    """For rewards and agents that read labels: return what is wrong with tasks that they cannot judge, by place in ``tasks``.

    Called for each source of tasks that are read as a whole, before anything is sampled. Such a task is a bad row
    (``data.on_bad_row``). Rewards of weight 0 are not asked.
    """


@hookspec(calls="one", ahead=True, gives=(Items("tasks or their numbers"),))
def draw_tasks(tasks: Sequence[Task], count: int, step: int) -> Sequence[int | Task]:
    """Choose the next tasks, instead of the seed's order: return ``count`` indices into ``tasks``, or the plugin's own tasks.

    Called again in the same step if filters dropped groups. The host saves ``state_dict`` before the step and restores it if the
    step is interrupted, so that a resumed run draws the same tasks.
    """


# --- agents -------------------------------------------------------------------------------------


@hookspec(calls="one", per="agent", threaded=True, ahead=True, gives=(Step,))
def agent_reset(episode: Episode) -> Step | Awaitable[Step]:
    """Start an episode. ``observation=None`` means the task's own prompt. An answer after ``rollout.step_timeout_s`` is too
    late, and the episode has failed. This is also true for ``agent_step`` and ``agent_close``.
    """


@hookspec(calls="one", per="agent", threaded=True, ahead=True, gives=(Step,))
def agent_step(episode: Episode, action: Action) -> Step | Awaitable[Step]:
    """Answer the policy's action. ``done`` ends the episode. May raise ``EpisodeFailed``."""


@hookspec(calls="one", per="agent", threaded=True, ahead=True)
def agent_close(episode: Episode) -> Awaitable[None] | None:
    """Release the episode's resources. Always called, also after a failure and after ``agent_run``. After a deadline or an
    interrupt, a late call may still be running in its thread.
    """


@hookspec(calls="one", per="agent", threaded=True, ahead=True, gives=(Items("trajectories"),))
def agent_run(episode: Episode, policy: Policy) -> Awaitable[Sequence[Trajectory]]:
    """Run one episode. For agents that run their own loop, instead of reset and step. Its deadline is
    ``rollout.episode_timeout_s``.

    Every sampled token may be an action in only one of the rows. A row may name the row from which it branched.
    """


@hookspec(calls="one", ahead=True, gives=(str, None))
def choose_role(episode: Episode, role: str) -> str | None:
    """Return the frozen role that answers in this episode where its agent asks for ``role`` (``policy.role``); ``None``: that one.
    It is a role of ``needs`` with ``generates``.
    """


# --- rewards and filters ------------------------------------------------------------------------


@hookspec(calls="each", threaded=True, ahead=True)
def score(
    trajectories: Sequence[Trajectory], context: ScoreContext
) -> Sequence[Reward | float | Unjudged | None] | Awaitable[Sequence[Reward | float | Unjudged | None]]:
    """Score a finished group: return one entry per trajectory, ``Unjudged(reason)`` or ``None`` if it cannot be scored."""


@hookspec(calls="and", ahead=True, gives=(bool, Drop, None))
def keep_group(group: Group) -> bool | Drop:
    """Return ``True``, or ``Drop(reason)`` to drop the group. The host then draws another, up to a limit.

    Called when a group is finished; if the plugin has ``state_dict``, in the order of the draws.
    """


@hookspec(calls="each", gives=(Mapping, None))
def rewrite_prompts(experience: Experience) -> Mapping[str, Sequence[Sequence[int]]] | None:
    """Return other prompts, as token ids, one for each row, under which a frozen role sees the batch's completions: with a
    solution, feedback or a hint, say. Keys are roles; what ``Needs.outputs`` ask of them is then computed that way.

    Called before any of these, with rewards as plugins gave them. Rows that keep their prompt repeat it. A prompt with its
    completion must fit the role (``RoleHandle.context_length``). Rows with pictures are refused.
    """


@hookspec(calls="each", gives=(Mapping, None))
def rewrite_rows(experience: Experience) -> Mapping[str, Sequence[Trajectory]] | None:
    """Return the batch's rows in the tokens of roles with another tokenizer (``RoleNeed.own_tokens``), one trajectory for each
    row: the same text, as the role reads it. What ``Needs.outputs`` ask of the role is computed over these rows, and is in
    ``batch.rows[role]``; a whole distribution is in ``outputs.others[role]``, each model's over its own tokens.

    Called with ``rewrite_prompts``. A row has a prompt and a completion, and fits the role (``RoleHandle.context_length``). Rows
    with pictures are refused.
    """


@hookspec(calls="chained", gives=("[B]",))
def transform_rewards(experience: Experience, rewards: Tensor) -> Tensor:
    """Change the rewards, ``[B]`` → ``[B]``, before any baseline: clip, normalise, penalise."""


@hookspec(calls="summed", gives=("[B, T]", None))
def shape_rewards(experience: Experience) -> Tensor:
    """Return ``[B, T]``, which is added to the token rewards after scoring."""


@hookspec(calls="and", gives=("[B, T] bool", None))
def loss_masks(experience: Experience) -> Tensor:
    """Return ``[B, T]`` bool: the tokens that stay in the loss and its denominator. If ``needs`` have a ``min_group_size``, the
    host leaves out rows of smaller groups.
    """


# --- the learning signal ------------------------------------------------------------------------


@hookspec(calls="one", gives=(Advantages,))
def compute_advantages(experience: Experience) -> Advantages:
    """Compute advantages and returns, ``[B, T]``, over the whole rollout batch."""


@hookspec(calls="each", gives=(Mapping, None))
def prepare_batch(experience: Experience) -> Mapping[str, Tensor | float] | None:
    """Return data for this plugin's own worker hooks. It is in ``batch.extra[alias]``, and in these hooks in ``batch.own``. Called
    after advantages and masks. Tensors with ``B`` rows are sliced with the batch."""


@hookspec(calls="each", gives=(Items("trajectories", Trajectory), None))
def auxiliary_rows(step: int) -> Sequence[Trajectory] | None:
    """Return rows that train beside the sampled batch of a step, in losses of this plugin alone: demonstrations, pre-training
    text, answers of earlier steps.

    They take part in the passes of the update. ``batch.own["beside"]``, ``[B, T]`` bool, is true at their action tokens, which
    train: give ``Extra("beside")`` as the mask of a loss term. They are in no other mask, and have no rewards and advantages. Only
    for algorithms with advantages. ``rlhf_rows.read_rows`` reads a data set.
    """


@hookspec(calls="multiplied", where="worker", gives=("[B, T]", "[B]", None))
def importance_weights(logprobs: PolicyLogprobs, batch: Batch) -> Tensor:
    """Return weights ``[B, T]`` or ``[B]`` that correct for the sampler. They multiply loss terms marked
    ``corrected``. The weights of a row may depend on this row only.

    ``batch`` has ``advantages``, ``action_mask``, and the ``versions`` ``[B, T]`` that sampled the tokens; the step began with
    ``version``. Where ``action_mask`` is false, tensors may have any values. Terms of shape ``[B]`` take only weights ``[B]``.
    Weights that no term uses are an error. With ``train.old_logprobs sampler`` the ratio has the correction in it, so only weights
    that are 0 act; a plugin with others forbids that setting (``Needs.forbids``).
    """


@hookspec(calls="one", gives=(Items("trajectories", Trajectory),))
def make_rows(groups: Sequence[Group]) -> Sequence[Trajectory]:
    """Return the rows to train on: each belongs to one of the groups.

    For a data set, the groups are its units. A row may be left out of the loss (``loss_masks``); then only ``batch_statistics``
    sees it. In a run that samples, the groups are those that were kept, and ``Trajectory.reward`` is the one that advantages
    would be computed from. The rows take the place of ``compute_advantages``: ``batch.advantages`` is ``None``, and a batch may
    be smaller than what was sampled. Rows to compare get a common ``episode_id`` and ``columns``: change copies
    (``dataclasses.replace``).
    """


@hookspec(calls="each", where="worker", gives=(Items("Metric", Metric), None))
def batch_statistics(role: str, outputs: Outputs, batch: Batch) -> Iterable[Metric]:
    """Return metrics of a pass without gradient over the optimizer batch. They are reduced over all ranks into ``batch.stats``.
    Called for the same roles as ``compute_loss``."""


@hookspec(calls="each", where="worker", gives=(Items("LossTerm or Metric", LossTerm, Metric), None))
def compute_loss(role: str, outputs: Outputs, batch: Batch) -> LossItems:
    """Return unreduced loss terms and metrics of a micro-batch. Called for the trainable roles of the plugin's ``needs``; for
    the actor if there are none.
    """


@hookspec(calls="each", where="worker", gives=(AbstractContextManager, None))
def around_pass(
    role: str, model: nn.Module, lengths: Sequence[int], traces: Sequence[Mapping[str, Any]] | None
) -> AbstractContextManager[Any] | None:
    """Provisional. Return what surrounds the layers in a pass of a role's model over some rows, with or without gradient, or
    ``None``. In the backward pass, layers that are computed again are outside of it.

    ``model`` is what computes, the role's own or kernels' version of it. Rows have ``lengths`` tokens, prompts included; the last
    one may be left out. ``traces`` are those of ``batch``.
    """


# --- reporting and state ------------------------------------------------------------------------


@hookspec(calls="all", gives=(Stop, Adjust, None))
def step_finished(step: int, metrics: Mapping[str, float]) -> Stop | Adjust | None:
    """Called with the reduced metrics of a training step, before the next batch. ``Stop(reason)`` ends the run normally.
    ``Adjust({"actor.lr": 1e-6, "kl.coef": 0.02})`` changes settings from the next step on; checkpoints keep them."""


@hookspec(calls="each")
def adjust(settings: Mapping[str, float]) -> None:
    """Change the plugin's own options, because a plugin returned ``Adjust``: ``ALIAS.NAME`` arrives as ``NAME``. Raise
    ``UserError`` for an unknown name or a bad value. Save lasting changes in ``state_dict``."""


@hookspec(calls="each", gives=(Items("Metric", Metric), None))
def step_metrics(step: int) -> Iterable[Metric] | None:
    """Return figures of the plugin's own since it was asked last, such as calls of a server and their cost. They are in the
    step's metrics as ``ALIAS/NAME``. Called after a step and its evaluation, before ``step_finished``.
    """


@hookspec(calls="all")
def log_metrics(step: int, metrics: Mapping[str, float]) -> None:
    """Write a step's metrics."""


@hookspec(calls="all")
def log_trajectories(step: int, split: str, trajectories: Sequence[Trajectory]) -> None:
    """Write a step's trajectories."""


@hookspec(calls="each", gives=(Mapping, None))
def saved_config(role: str) -> Mapping[str, Any] | None:
    """Return fields, JSON values, that the ``config.json`` of a saved role gets in a checkpoint: the mean of a reward model's
    scores, say. They replace fields of the same name. An adapter has no such file.
    """


@hookspec(calls="each", gives=(Mapping, None))
def state_dict() -> Mapping[str, Any]:
    """Return the state to save in a checkpoint: plain values, lists, dicts and tensors.

    Called before the first step, and before and after ``step_finished``: whatever fails later, the previous step can be saved.
    """


@hookspec(calls="each")
def load_state_dict(state: Mapping[str, Any]) -> None:
    """Restore the state that ``state_dict`` returned."""
