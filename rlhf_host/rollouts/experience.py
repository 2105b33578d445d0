"""Groups as tensors, ``[B, T]`` over the completion region."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_host.errors import RunError
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.rollouts.scoring import AGENT
from rlhf_host.types import Experience, Group, Trajectory

_NOTHING, _OBSERVATION, _ACTION = 0, 1, 2


def make_experience(
    groups: Sequence[Group], weights: dict[str, float], *, step: int, max_new_tokens: int, temperature: float
) -> Experience:
    """Rows in group order, right-padded.

    Args:
        groups: judged trajectories only.
        weights: reward alias → weight, as ``score_group`` used them.
    """
    rows = [trajectory for group in groups for trajectory in group.trajectories]
    ids, kinds, logs, turns, versions = zip(*(_columns(row) for row in rows), strict=True)
    width = max(1, *map(len, ids))
    completion_ids = _padded(ids, width, 0, torch.int64)
    kind = _padded(kinds, width, _NOTHING, torch.int8)
    action_mask = kind == _ACTION
    token_rewards = torch.zeros(len(rows), width, dtype=torch.float32)
    names = list(weights)
    if any(AGENT in row.rewards for row in rows):
        names.append(AGENT)
        weights = {**weights, AGENT: 1.0}
    turn_ids = _padded(turns, width, -1, torch.int64)
    _place_rewards(rows, weights, turns, token_rewards)
    group_numbers = {group.group_id: number for number, group in enumerate(groups)}
    episodes: dict[str, int] = {}
    episode_id = torch.tensor([episodes.setdefault(row.episode_id, len(episodes)) for row in rows])
    missing = float("nan")
    return Experience(
        prompt_ids=[row.prompt_ids for row in rows],
        completion_ids=completion_ids,
        completion_mask=kind != _NOTHING,
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
        sampler_logprobs=_padded(logs, width, 0.0, torch.float32),
        versions=_padded(versions, width, 0, torch.int64),
        reward_names=tuple(names),
        step=step,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        trajectories=rows,
    )


def _columns(row: Trajectory) -> tuple[list[int], list[int], list[float], list[int], list[int]]:
    """Per completion token: id, kind, log μ, turn and version."""
    ids: list[int] = []
    kinds: list[int] = []
    logs: list[float] = []
    turns: list[int] = []
    versions: list[int] = []
    turn = 0
    for segment in row.completion:
        count = len(segment.token_ids)
        acts = segment.kind == "action"
        ids += segment.token_ids
        kinds += [_ACTION if acts else _OBSERVATION] * count
        logs += (segment.logprobs or [0.0] * count) if acts else [0.0] * count
        turns += [turn if acts else -1] * count
        versions += (segment.versions or [0] * count) if acts else [0] * count
        turn += acts
    return ids, kinds, logs, turns, versions


def _padded(rows: Sequence[list[Any]], width: int, fill: Any, dtype: torch.dtype) -> Tensor:
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows], dtype=dtype)


def _place_rewards(rows: Sequence[Trajectory], weights: dict[str, float], turns: Sequence[list[int]], into: Tensor) -> None:
    """The weighted rewards on their tokens: where the plugin said, else on the last action token."""
    at_row: list[int] = []
    at_column: list[int] = []
    values: list[float] = []
    for i, row in enumerate(rows):
        actions = [column for column, turn in enumerate(turns[i]) if turn >= 0]
        if not actions:
            continue
        ends = {turn: column for column, turn in enumerate(turns[i]) if turn >= 0}
        for alias, reward in row.rewards.items():
            weight = weights.get(alias, 0.0)
            if reward is None or weight == 0:
                continue
            if reward.tokens is not None:
                placed = list(zip(actions, reward.tokens, strict=True))
            elif reward.turns is not None:
                placed = [(ends[turn], value) for turn, value in enumerate(reward.turns) if turn in ends]
            else:
                placed = [(actions[-1], reward.total)]
            for column, value in placed:
                at_row.append(i)
                at_column.append(column)
                values.append(weight * float(value))
    if values:
        into.index_put_((torch.tensor(at_row), torch.tensor(at_column)), torch.tensor(values), accumulate=True)


def apply_rewards(experience: Experience, hooks: PluginManager) -> None:
    """``transform_rewards`` in order, then ``shape_rewards`` summed and ``loss_masks`` joined, in place.

    What a transform changes lands on the row's last action token too.
    """
    before = experience.rewards.clone()
    for key in hooks.names("transform_rewards"):
        changed = hooks.call(key, "transform_rewards", experience=experience, rewards=experience.rewards.clone())
        experience.rewards = _checked(changed, before.shape, key, "transform_rewards").to(torch.float32)
    change = experience.rewards - before
    last = experience.action_mask.to(torch.int64).cumsum(-1).argmax(-1, keepdim=True)
    on_last = torch.zeros_like(experience.token_rewards).scatter(1, last, change.unsqueeze(-1))
    experience.token_rewards = experience.token_rewards + torch.where(experience.action_mask, on_last, 0.0)
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
