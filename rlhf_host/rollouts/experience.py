"""Groups as tensors, ``[B, T]`` over the completion region."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlhf_host.errors import RunError
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.rollouts.scoring import AGENT
from rlhf_host.types import Experience, Group, Trajectory


def make_experience(
    groups: Sequence[Group], weights: dict[str, float], *, step: int, max_new_tokens: int, temperature: float
) -> Experience:
    """Rows in group order, right-padded.

    Args:
        groups: judged trajectories only.
        weights: reward alias → weight, as ``score_group`` used them.
    """
    rows = [trajectory for group in groups for trajectory in group.trajectories]
    names = list(weights)
    if any(AGENT in row.rewards for row in rows):
        names.append(AGENT)
        weights = {**weights, AGENT: 1.0}
    line = _line(rows)
    width = max(1, *line.lengths)
    completion_mask = torch.arange(width) < torch.tensor(line.lengths)[:, None]

    def spread(values: Tensor, fill: int) -> Tensor:
        return values.new_full(completion_mask.shape, fill).masked_scatter_(completion_mask, values)

    turns = torch.repeat_interleave(torch.tensor(line.turns, dtype=torch.int64), torch.tensor(line.sizes, dtype=torch.int64))
    turn_ids = spread(turns, -1)
    action_mask = turn_ids >= 0
    token_rewards = _place_rewards(rows, weights, turn_ids, action_mask)
    group_numbers = {group.group_id: number for number, group in enumerate(groups)}
    episodes: dict[str, int] = {}
    episode_id = torch.tensor([episodes.setdefault(row.episode_id, len(episodes)) for row in rows])
    missing = float("nan")
    return Experience(
        prompt_ids=[row.prompt_ids for row in rows],
        completion_ids=spread(torch.tensor(line.ids, dtype=torch.int64), 0),
        completion_mask=completion_mask,
        action_mask=action_mask,
        loss_mask=action_mask.clone(),
        turn_ids=turn_ids,
        group_id=torch.tensor([group_numbers[row.group_id] for row in rows]),
        episode_id=episode_id,
        unit_id=torch.arange(len(rows)),
        task_index=torch.tensor([row.task.index for row in rows]),
        truncated=torch.tensor([row.truncated for row in rows]),
        rewards=torch.tensor([row.reward for row in rows], dtype=torch.float32),
        plugin_rewards=torch.tensor(
            [[r.total if (r := row.rewards.get(name)) else missing for name in names] for row in rows], dtype=torch.float32
        ).reshape(len(rows), len(names)),
        scores=torch.tensor([missing if row.score is None else row.score for row in rows], dtype=torch.float32),
        token_rewards=token_rewards,
        sampler_logprobs=spread(torch.tensor(line.logprobs, dtype=torch.float32), 0),
        versions=spread(torch.tensor(line.versions, dtype=torch.int64), 0),
        reward_names=tuple(names),
        reward_weights=tuple(float(weights[name]) for name in names),
        step=step,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        trajectories=rows,
    )


@dataclass(slots=True)
class _Line:
    """All rows' completions, one after the other: per token, per segment and per row."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    """Per segment; -1 for observations."""
    lengths: list[int] = field(default_factory=list)


def _line(rows: Sequence[Trajectory]) -> _Line:
    line = _Line()
    for row in rows:
        before, turn = len(line.ids), 0
        for segment in row.completion:
            acts = segment.kind == "action"
            count = len(segment.token_ids)
            line.ids += segment.token_ids
            line.logprobs += (segment.logprobs if acts else None) or [0.0] * count
            line.versions += (segment.versions if acts else None) or [0] * count
            line.sizes.append(count)
            line.turns.append(turn if acts else -1)
            turn += acts
        line.lengths.append(len(line.ids) - before)
    return line


def _place_rewards(rows: Sequence[Trajectory], weights: dict[str, float], turn_ids: Tensor, action_mask: Tensor) -> Tensor:
    """``[B, T]``: the weighted rewards on their tokens: where the plugin said, else on the last action token."""
    whole: list[float] = []
    placed = torch.zeros(action_mask.shape)
    for i, row in enumerate(rows):
        total = 0.0
        for alias, reward in row.rewards.items():
            weight = weights.get(alias, 0.0)
            if reward is None or weight == 0:
                continue
            if reward.tokens is not None:
                placed[i, action_mask[i]] += weight * torch.tensor([float(value) for value in reward.tokens])
            elif reward.turns is not None:
                for turn, value in enumerate(reward.turns):
                    columns = (turn_ids[i] == turn).nonzero()
                    if len(columns):
                        placed[i, columns[-1]] += weight * float(value)
            else:
                total += weight * reward.total
        whole.append(total)
    return _on_last_action(torch.tensor(whole), action_mask) + placed


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
