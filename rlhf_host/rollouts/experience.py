"""Groups as tensors, ``[B, T]`` over the completion region."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_host.errors import RunError
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.records.episodes import Group, Trajectory
from rlhf_host.records.tensors import Experience
from rlhf_host.rollouts.scoring import AGENT


def make_experience(
    groups: Sequence[Group], weights: dict[str, float], *, step: int, max_new_tokens: int, temperature: float
) -> Experience:
    """Rows in group order, right-padded.

    Args:
        groups: judged trajectories only.
        weights: reward alias → weight, as ``score_group`` used them.
    """
    return as_tensors(read_groups(groups, weights), step=step, max_new_tokens=max_new_tokens, temperature=temperature)


def as_tensors(table: Table, *, step: int, max_new_tokens: int, temperature: float) -> Experience:
    """The second half of ``make_experience``."""
    rows, weights, names = table.rows, table.weights, list(table.weights)
    lengths = _tensor(table.lengths, np.int64)
    width = max(1, *table.lengths)
    completion_mask = torch.arange(width) < lengths[:, None]

    def spread(values: Tensor, fill: int) -> Tensor:
        return values.new_full(completion_mask.shape, fill).masked_scatter_(completion_mask, values)

    turns = torch.repeat_interleave(_tensor(table.turns, np.int64), _tensor(table.sizes, np.int64))
    turn_ids = spread(turns, -1)
    action_mask = turn_ids >= 0
    return Experience(
        prompt_ids=table.prompts,
        completion_ids=spread(_tensor(table.ids, np.int64), 0),
        completion_mask=completion_mask,
        action_mask=action_mask,
        loss_mask=action_mask.clone(),
        turn_ids=turn_ids,
        group_id=_tensor(table.groups, np.int64),
        episode_id=_tensor(table.episodes, np.int64),
        unit_id=torch.arange(len(rows)),
        task_index=_tensor(table.tasks, np.int64),
        truncated=_tensor(table.truncated, np.bool_),
        rewards=_tensor(table.rewards, np.float32),
        plugin_rewards=_tensor(table.of_plugins, np.float32).reshape(len(rows), len(names)),
        scores=_tensor(table.scores, np.float32),
        token_rewards=_place_rewards(table, turn_ids, action_mask),
        sampler_logprobs=spread(_tensor(table.logprobs, np.float32), 0),
        versions=spread(_tensor(table.versions, np.int64), 0),
        reward_names=tuple(names),
        reward_weights=tuple(float(weights[name]) for name in names),
        step=step,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        trajectories=rows,
    )


def _tensor(values: Sequence[Any], dtype: Any) -> Tensor:
    """By way of numpy, which reads a list of numbers several times faster than torch does."""
    return torch.from_numpy(np.array(values, dtype=dtype))


@dataclass(slots=True)
class Table:
    """Columns over rows; ``ids``, ``logprobs`` and ``versions`` are over all rows' completion tokens, one after the other."""

    rows: list[Trajectory]
    weights: dict[str, float]
    """By reward alias; ``agent`` is among them where agents gave rewards."""
    prompts: list[list[int]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Per segment."""
    turns: list[int] = field(default_factory=list)
    """Per segment; -1 for observations."""
    lengths: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    episodes: list[int] = field(default_factory=list)
    tasks: list[int] = field(default_factory=list)
    truncated: list[bool] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    of_plugins: list[float] = field(default_factory=list)
    """Per row and reward; NaN where it did not judge."""
    whole: list[float] = field(default_factory=list)
    """The weighted rewards that no plugin placed on turns or tokens."""
    placing: list[int] = field(default_factory=list)
    """Rows of which some are placed."""


def read_groups(groups: Sequence[Group], weights: dict[str, float]) -> Table:
    """The first half of ``make_experience``, without tensors: in the thread that made the trajectories, whose core has them in
    its cache, it takes half the time. One pass, because there may be a hundred thousand rows."""
    rows = [trajectory for group in groups for trajectory in group.trajectories]
    if any(AGENT in row.rewards for row in rows):
        weights = {**weights, AGENT: 1.0}
    table, episodes = Table(rows, weights), dict[str, int]()
    numbers = {group.group_id: number for number, group in enumerate(groups)}
    for index, row in enumerate(rows):
        before, turn = len(table.ids), 0
        table.prompts.append(row.prompt_ids)
        for segment in row.completion:
            acts = segment.kind == "action"
            count = len(segment.token_ids)
            table.ids += segment.token_ids
            table.logprobs += (segment.logprobs if acts else None) or [0.0] * count
            table.versions += (segment.versions if acts else None) or [0] * count
            table.sizes.append(count)
            table.turns.append(turn if acts else -1)
            turn += acts
        table.lengths.append(len(table.ids) - before)
        table.groups.append(numbers[row.group_id])
        table.episodes.append(episodes.setdefault(row.episode_id, len(episodes)))
        table.tasks.append(row.task.index)
        table.truncated.append(row.truncated)
        table.rewards.append(row.reward)
        table.scores.append(math.nan if row.score is None else row.score)
        whole, placed = 0.0, False
        for name, weight in weights.items():
            reward = row.rewards.get(name)
            total = math.nan if reward is None else reward.total
            table.of_plugins.append(total)
            if reward is None or weight == 0:
                continue
            if reward.tokens is None and reward.turns is None:
                whole += weight * total
            else:
                placed = True
        table.whole.append(whole)
        if placed:
            table.placing.append(index)
    return table


def _place_rewards(table: Table, turn_ids: Tensor, action_mask: Tensor) -> Tensor:
    """``[B, T]``: the weighted rewards on their tokens: where the plugin said, else on the last action token."""
    found = _on_last_action(_tensor(table.whole, np.float32), action_mask)
    for i in table.placing:
        for alias, reward in table.rows[i].rewards.items():
            weight = table.weights.get(alias, 0.0)
            if reward is None or weight == 0:
                continue
            if reward.tokens is not None:
                found[i, action_mask[i]] += weight * torch.tensor([float(value) for value in reward.tokens])
            elif reward.turns is not None:
                for turn, value in enumerate(reward.turns):
                    columns = (turn_ids[i] == turn).nonzero()
                    if len(columns):
                        found[i, columns[-1]] += weight * float(value)
    return found


def _on_last_action(values: Tensor, action_mask: Tensor) -> Tensor:
    """``[B]`` → ``[B, T]``: on each row's last action token, where it has one."""
    last = action_mask.to(torch.int64).cumsum(-1).argmax(-1, keepdim=True)
    return torch.where(action_mask, torch.zeros(action_mask.shape).scatter(1, last, values.unsqueeze(-1)), 0.0)


def apply_rewards(experience: Experience, hooks: PluginManager) -> None:
    """``transform_rewards`` in order, then ``shape_rewards`` summed and ``loss_masks`` joined, in place.

    What a transform changes lands on the row's last action token too.
    """
    before = experience.rewards.clone()
    for key in hooks.names("transform_rewards"):
        changed = hooks.call(key, "transform_rewards", experience=experience, rewards=experience.rewards.clone())
        experience.rewards = _checked(changed, before.shape, key, "transform_rewards").to(torch.float32)
    if hooks.has("transform_rewards"):
        change = experience.rewards - before
        experience.token_rewards = experience.token_rewards + _on_last_action(change, experience.action_mask)
    shape = experience.action_mask.shape
    shaped = torch.zeros(shape)
    for key, part in hooks.each("shape_rewards", experience=experience):
        kept = torch.where(experience.action_mask, _of_shape(part, shape, key, "shape_rewards"), 0.0)
        shaped = shaped + _checked(kept, shape, key, "shape_rewards").to(torch.float32)
    experience.shaped = shaped
    for key, mask in hooks.each("loss_masks", experience=experience):
        if _of_shape(mask, shape, key, "loss_masks").dtype != torch.bool:
            raise RunError(f"{key} gave a {mask.dtype} tensor from loss_masks; a mask is bool")
        experience.loss_mask = experience.loss_mask & mask


def _of_shape(value: Any, shape: torch.Size, key: str, hook: str) -> Tensor:
    if not isinstance(value, Tensor) or value.shape != shape:
        given = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise RunError(f"{key} gave {given} from {hook}, expected a tensor {list(shape)}")
    return value


def _checked(value: Any, shape: torch.Size, key: str, hook: str) -> Tensor:
    if not bool(torch.isfinite(_of_shape(value, shape, key, hook)).all()):
        raise RunError(f"{key} gave non-finite numbers from {hook}")
    return value


def reward_metrics(experience: Experience) -> dict[str, float]:
    """Rewards, scores, lengths and truncation of a batch, as they go to the log."""
    rewards = experience.rewards.double()
    lengths = experience.action_mask.sum(-1).double()
    values = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(correction=0),
        "reward/min": rewards.min(),
        "reward/max": rewards.max(),
        "length/mean": lengths.mean(),
        "length/max": lengths.max(),
        "truncated": experience.truncated.double().mean(),
    }
    for column, name in enumerate(experience.reward_names):
        values[f"reward/{name}"] = experience.plugin_rewards[:, column].double().nanmean()
    values["score/mean"] = experience.scores.double().nanmean()
    extra: dict[str, list[float]] = {}
    for row in experience.trajectories:
        for name, value in row.metrics.items():
            extra.setdefault(name, []).append(float(value))
    found = {name: float(value) for name, value in values.items() if math.isfinite(float(value))}
    return {**{name: sum(items) / len(items) for name, items in extra.items()}, **found}
