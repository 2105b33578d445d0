"""Batches of sampled or saved rollouts: groups become tensors, then get log-probabilities, advantages and prepared values of
plugins. With ``make_rows`` a run trains only on the rows that it chooses, without advantages.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from rlhf_host.config.schema import RunConfig
from rlhf_host.errors import RunError, blaming
from rlhf_host.functional.statistics import GroupedEpisodes, masked_mean
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.protocols import Trainer
from rlhf_host.records.episodes import Group
from rlhf_host.records.metric_names import MetricNames
from rlhf_host.records.needs import Needs, RoleHandle, ScoreContext
from rlhf_host.records.ragged import Rows
from rlhf_host.records.tensors import Experience, RoleOutput
from rlhf_host.records.token_sets import support_metrics
from rlhf_host.rollouts.collect import Collected, Played
from rlhf_host.rollouts.experience import apply_masks, apply_rewards, joined, make_experience, reward_metrics, row_means
from rlhf_host.rollouts.pipeline import Pipeline
from rlhf_host.training.auxiliary_rows import auxiliary_rows, no_rows
from rlhf_host.training.events import EventLoop
from rlhf_host.training.reduction import reduced
from rlhf_host.training.role_handles import completions
from rlhf_host.training.sampled_rollouts import Rollouts
from rlhf_host.training.source import Drawn, timed

PATIENCE = (
    *("max_unjudged", "score_timeout_s", "score_retries", "step_timeout_s", "episode_timeout_s", "episode_retries"),
    *("stall_s", "policy_port"),
)
"""Settings of rollouts that do not affect a finished group."""

log = logging.getLogger(__name__)

LAGS = 4
"""Number of version lags that have a metric even if no token is so old."""


@dataclass(slots=True)
class RolloutSource:
    """A ``Source`` over rollouts."""

    rollouts: Rollouts
    config: RunConfig
    manager: PluginManager
    needs: Needs
    trainer: Trainer
    context: ScoreContext
    """Context of any step, for scoring."""
    loop: EventLoop
    pipeline: Pipeline | None = field(init=False)
    _made_by: dict[str, str] = field(init=False)
    """Setting that sampled groups depend on → hash of its value."""
    _reasons: MetricNames = field(default_factory=lambda: MetricNames("reasons of filters"))

    def __post_init__(self) -> None:
        self.pipeline = self.rollouts if isinstance(self.rollouts, Pipeline) else None
        settings = self.config.model_dump(mode="json", by_alias=True)
        parts = {name: settings[name] for name in ("data", "rollout", "reward", "agent", "agents")}
        parts["rollout"] = {name: value for name, value in parts["rollout"].items() if name not in PATIENCE}
        parts["train.batch_size"] = self.config.train.batch_size
        self._made_by = {
            name: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16] for name, value in parts.items()
        }

    @property
    def steps(self) -> int | None:
        return self.rollouts.steps

    def state_dict(self) -> dict[str, Any]:
        return {**self.rollouts.state_dict(), "made_by": self._made_by}

    def load_state_dict(self, state: Mapping[str, Any], finished: Mapping[int, Played]) -> None:
        """Restores the position. Uses finished groups as they are, unless the settings would now produce others."""
        changed = [name for name, value in self._made_by.items() if state["made_by"].get(name) != value]
        if finished and (changed or self.pipeline is None):
            why = f"{' and '.join(changed)} changed" if changed else "async_depth is 0, and they are of older weights"
            log.warning("%d finished groups of the checkpoint are sampled again: %s", len(finished), why)
            finished = {}
        self.rollouts.load_state_dict(state, finished)

    def draw(self, step: int, version: int) -> Drawn:
        times: dict[str, float] = {}
        context = replace(self.context, step=step)
        with timed(times, "rollout"):
            collected = self.loop.run(self.rollouts.next_rollouts(context))
        rollout = self.config.rollout
        make = partial(
            make_experience, step=step, max_new_tokens=rollout.max_new_tokens, temperature=rollout.temperature, version=version
        )
        experience = batch = make(collected.groups, self.rollouts.weights)
        if self.manager.has("make_rows"):
            with timed(times, "rows"):
                batch = make(self._chosen(experience, collected.groups), self.rollouts.weights)
                apply_masks(batch, self.manager)
        support = support_metrics(batch.trajectories, needed=bool(rollout.truncated_by))
        add_prompts(batch, self.manager, self.needs, self.context.roles)
        with timed(times, "logprobs"):
            add_outputs(batch, self.trainer, self.needs, mode := self.config.old_logprobs_mode)
            if (known := batch.old_logprobs if mode == "recompute" else batch.logprobs.get("actor")) is not None:
                _note_logprobs(batch, known)
        with timed(times, "advantages"):
            own = add_advantages(batch, self.manager, self.needs) if batch is experience else _metrics_of_rows(batch, collected)
            add_extra(batch, self.manager, self.trainer, self.needs)
            no_rows(batch, self.manager)
            beside = auxiliary_rows(self.manager, step, lambda groups: make(groups, {}))
        of_rows = (reward_metrics(experience), identical_answers(experience), support)
        metrics = joined(collected.metrics(self._reasons), *of_rows, own)
        fresh = True
        if self.pipeline is not None and self.pipeline.max_age:
            lag = staleness(batch, self.pipeline.max_age)
            metrics |= lag
            fresh = lag["staleness/max"] == 0.0
        rows, measured = collected.trajectories_in_order(), row_means(experience.trajectories)
        return Drawn(batch, rows, fresh, self.rollouts.epoch, metrics, measured, times, collected.draws, beside)

    def _chosen(self, experience: Experience, groups: Sequence[Group]) -> list[Group]:
        """Returns the rows to train on, chosen from groups whose rewards are transformed and shaped first."""
        from rlhf_host.training.made_rows import chosen_rows

        if self.manager.has("shape_rewards"):  # it may look at log-probabilities
            add_outputs(experience, self.trainer, self.needs, "fused")
        apply_rewards(experience, self.manager)
        return chosen_rows(groups, experience, self.manager)


def _note_logprobs(batch: Experience, logprobs: Tensor) -> None:
    """Adds log-probabilities per token to the trajectories, for people who look at single tokens."""
    for trajectory, values in zip(batch.trajectories, Rows.of(batch.completion_mask).each(logprobs), strict=True):
        trajectory.trainer_logprobs = values  # type: ignore[assignment]


def _metrics_of_rows(batch: Experience, collected: Collected) -> dict[str, float]:
    """Returns metrics of the rows that ``make_rows`` chose."""
    groups = len(set(batch.group_id.tolist()))
    return {
        "rows/count": float(len(batch)),
        "rows/reward": float(batch.rewards.double().mean()),
        "rows/groups_left_out": float(len(collected.groups) - groups),
    }


def staleness(batch: Experience, most: int) -> dict[str, float]:
    """Returns how many versions older than the weights the trained tokens are. Raises ``RunError`` for more than ``most``."""
    lags = torch.where(batch.action_mask, batch.version - batch.versions, 0)
    if int(lags.min()) < 0 or int(lags.max()) > most:
        raise RunError(
            f"step {batch.step}: tokens are {int(lags.min())} to {int(lags.max())} versions old, and may be {most}:"
            " this is a defect of the host or of the engine"
        )
    tokens = lags[batch.action_mask].double()
    newest = torch.where(batch.action_mask, lags, most + 1).amin(-1)
    mixed = (lags.amax(-1) > newest) & batch.action_mask.any(-1)
    mean = float(tokens.mean()) if tokens.numel() else 0.0
    values = {"staleness/mean": mean, "staleness/max": float(lags.max()), "staleness/mixed": float(mixed.double().mean())}
    shares = torch.bincount(lags[batch.action_mask], minlength=min(most, LAGS) + 1).double() / max(1, tokens.numel())
    return values | {f"staleness/lag{lag}": share for lag, share in enumerate(shares.tolist())}


def identical_answers(batch: Experience) -> dict[str, float]:
    """Returns the share of groups (of several rows) in which all rows have the same completion."""
    rows, groups = len(batch), batch.group_id
    first = torch.full((rows,), rows, dtype=torch.int64).scatter_reduce(0, groups, torch.arange(rows), "amin")[groups]
    ids = list(Rows.of(batch.completion_mask).each(batch.completion_ids))
    same = torch.tensor([torch.equal(own, ids[one]) for own, one in zip(ids, first.tolist(), strict=True)], dtype=torch.bool)
    sizes = groups.bincount()
    several = sizes > 1
    equal = sizes == groups[same].bincount(minlength=len(sizes))
    return {"rollout/identical": float(equal[several].double().mean())} if bool(several.any()) else {}


def add_prompts(experience: Experience, manager: PluginManager, needs: Needs, roles: Mapping[str, RoleHandle]) -> None:
    """Adds, in place, the prompts and rows that plugins write for frozen roles.

    Raises ``RunError`` for those of a role that is trained or not there, has its own tokens or does not, or that another plugin
    wrote; for rows with pictures; for a row that does not fit the role; and for a role with its own tokens that got none.
    """
    own = {need.name for need in needs.roles if need.own_tokens}
    frozen = {need.name for need in needs.roles if not need.trainable} - own
    kinds: Any = (("prompts", experience.prompts, frozen), ("rows", experience.rows, own))
    for noun, done, allowed in kinds:
        for key, written in manager.each(f"rewrite_{noun}", experience=experience):
            for role, given in written.items():
                who = f"{key}: rewrite_{noun} gave {noun} for the role {role!r}"
                if role not in allowed or role in done:
                    known = f"{'frozen' if allowed is frozen else 'with own_tokens'} are {', '.join(sorted(allowed))}"
                    raise RunError(f"{who}, and {'another plugin wrote them' if role in done else known}")
                if experience.images is not None:
                    raise RunError(f"{who}, and rows have pictures, which keep their places: leave the pictures out")
                seen = experience if allowed is frozen else completions(given, experience.temperature)
                sizes = [*zip(map(len, given if allowed is frozen else seen.prompt_ids), seen.lengths.tolist(), strict=False)]
                if len(given) != len(experience) or not all(size[0] and (size[1] or allowed is frozen) for size in sizes):
                    raise RunError(f"{who}: {len(given)}, expected {len(experience)} with tokens")
                if (longest := max(map(sum, sizes))) > (room := roles[role].context_length):
                    raise RunError(f"{who} with which a row has {longest} tokens, and it takes {room}")
                done[role] = given if allowed is frozen else seen
    if missing := own - experience.rows.keys():
        raise RunError(f"rewrite_rows gave no rows for the role {min(missing)!r}, which has its own tokens")


def add_outputs(experience: Experience, trainer: Trainer, needs: Needs, mode: str) -> None:
    """Adds, in place, the log-probabilities and values that plugins or the mode of ``old_logprobs`` need before advantages.
    Existing log-probabilities stay.
    """
    for role, quantity in ((output.role, output.what) for output in needs.outputs if output.role):
        if quantity != "distribution" and role not in (known := getattr(experience.rows.get(role, experience), quantity)):
            known[role] = trainer.outputs(role, cast(RoleOutput, quantity), experience.seen_by(role))
    if mode == "sampler":
        experience.old_logprobs = experience.sampler_logprobs
    # The policy as it is stands for a sampler that is unknown.
    if mode == "recompute" or (mode == "sampler" and bool((experience.action_mask & ~experience.sampled_mask).any())):
        now = experience.logprobs.get("actor")
        now, known = trainer.outputs("actor", "logprobs", experience) if now is None else now, experience.old_logprobs
        experience.old_logprobs = now if known is None else torch.where(experience.sampled_mask, known, now)


def add_advantages(experience: Experience, manager: PluginManager, needs: Needs) -> dict[str, float]:
    """Transforms and shapes rewards, then adds advantages, in place; returns their metrics. Raises ``RunError`` if a plugin
    returns another shape or non-finite numbers.
    """
    apply_rewards(experience, manager)
    (key,) = manager.names("compute_advantages")
    result = manager.call(key, "compute_advantages", experience=experience)
    who = f"{key}: compute_advantages"
    values, shape = {"advantages": result.advantages, "returns": result.returns}, Rows.of(experience.completion_mask)
    for name, value in values.items():
        if value is None and name == "returns":
            continue
        if not isinstance(value, Tensor):
            raise RunError(f"{who} gave {name} of the type {type(value).__name__}, expected a tensor")
        if value.shape != experience.action_mask.shape:
            raise RunError(f"{who} gave {name} {list(value.shape)}, expected {list(experience.action_mask.shape)}")
        values[name] = value = shape.ragged(value.to(torch.float32))
        if not bool(torch.isfinite(torch.where(experience.loss_mask, value, 0.0)).all()):
            raise RunError(f"{who} gave non-finite {name} at step {experience.step}")
    experience.advantages, experience.returns = values.values()
    assert experience.advantages is not None
    in_loss = experience.advantages[experience.loss_mask].double()
    metrics: dict[str, float] = {}
    if in_loss.numel():
        metrics |= {"advantages/mean": float(in_loss.mean()), "advantages/std": float(in_loss.std(correction=0))}
    if needs.min_group_size > 1:  # to others a group is nothing
        episodes = GroupedEpisodes(experience.rewards, experience.group_id, experience.episode_id)
        metrics["groups/no_variance"] = float(episodes.constant().double().mean())  # such groups teach nothing
    counts = experience.loss_mask.sum(-1).tolist()
    means = masked_mean(experience.advantages.double(), experience.loss_mask, -1).tolist()
    low = torch.where(experience.loss_mask, experience.advantages, torch.inf).amin(-1)
    high = torch.where(experience.loss_mask, experience.advantages, -torch.inf).amax(-1)
    rows = zip(means, counts, (low < high).tolist(), shape.each(experience.advantages), strict=True)
    for trajectory, (mean, count, differ, own) in zip(experience.trajectories, rows, strict=True):
        trajectory.advantage = mean if count else None
        if differ:
            trajectory.advantages = own  # type: ignore[assignment]
    with blaming(key, "the metrics of compute_advantages"):
        return joined(metrics, reduced(result.metrics))


def add_extra(experience: Experience, manager: PluginManager, trainer: Trainer, needs: Needs) -> None:
    """Adds, in place, data that only training needs: other roles' likeliest tokens, and what plugins prepare for their worker
    hooks. Raises ``RunError`` if a plugin returns anything but tensors and numbers, or two have one alias.
    """
    for output in needs.outputs:
        if output.what == "distribution" and output.top is not None:
            likeliest = trainer.topk(output.role, output.top, experience.seen_by(output.role))
            experience.rows.get(output.role, experience).distributions[output.role] = likeliest
    for key, values in manager.each("prepare_batch", experience=experience):
        alias = manager.by_key[key].alias
        if alias in experience.extra:
            raise RunError(f"two plugins called {alias} give prepare_batch; give {key} another alias")
        for name, value in values.items():
            if not isinstance(value, Tensor | float | int):
                raise RunError(f"{key} gave a {type(value).__name__} as {name!r} from prepare_batch; give tensors and numbers")
        experience.extra[alias] = dict(values)
