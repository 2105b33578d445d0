"""Groups as tensors, ``[B, T]`` over the completion region."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

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
    width = max(1, max(sum(len(s.token_ids) for s in row.completion) for row in rows))
    shape = (len(rows), width)
    completion_ids = torch.zeros(shape, dtype=torch.int64)
    completion_mask = torch.zeros(shape, dtype=torch.bool)
    action_mask = torch.zeros(shape, dtype=torch.bool)
    turn_ids = torch.full(shape, -1, dtype=torch.int64)
    logprobs = torch.zeros(shape, dtype=torch.float32)
    versions = torch.zeros(shape, dtype=torch.int64)
    token_rewards = torch.zeros(shape, dtype=torch.float32)
    names = list(weights)
    if any(AGENT in row.rewards for row in rows):
        names.append(AGENT)
        weights = {**weights, AGENT: 1.0}
    for i, row in enumerate(rows):
        at, turn = 0, 0
        for segment in row.completion:
            end = at + len(segment.token_ids)
            completion_ids[i, at:end] = torch.tensor(segment.token_ids, dtype=torch.int64)
            completion_mask[i, at:end] = True
            if segment.kind == "action":
                action_mask[i, at:end] = True
                turn_ids[i, at:end] = turn
                logprobs[i, at:end] = torch.tensor(segment.logprobs or [], dtype=torch.float32)
                versions[i, at:end] = torch.tensor(segment.versions or [], dtype=torch.int64)
                turn += 1
            at = end
        token_rewards[i] = _placed(row, weights, action_mask[i], turn_ids[i])
    group_numbers = {group.group_id: number for number, group in enumerate(groups)}
    episodes: dict[str, int] = {}
    episode_id = torch.tensor([episodes.setdefault(row.episode_id, len(episodes)) for row in rows])
    missing = float("nan")
    return Experience(
        prompt_ids=[row.prompt_ids for row in rows],
        completion_ids=completion_ids,
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
        sampler_logprobs=logprobs,
        versions=versions,
        reward_names=tuple(names),
        step=step,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        trajectories=rows,
    )


def _placed(row: Trajectory, weights: dict[str, float], actions: Tensor, turns: Tensor) -> Tensor:
    placed = torch.zeros(len(actions), dtype=torch.float32)
    where = actions.nonzero().squeeze(-1)
    if len(where) == 0:
        return placed
    for alias, reward in row.rewards.items():
        weight = weights.get(alias, 0.0)
        if reward is None or weight == 0:
            continue
        if reward.tokens is not None:
            placed[where] += weight * torch.tensor(list(reward.tokens), dtype=torch.float32)
        elif reward.turns is not None:
            for turn, value in enumerate(reward.turns):
                at = (turns == turn).nonzero().squeeze(-1)
                if len(at):
                    placed[at[-1]] += weight * float(value)
        else:
            placed[where[-1]] += weight * reward.total
    return placed


def apply_rewards(experience: Experience, hooks: PluginManager) -> None:
    """``transform_rewards`` in order, then ``shape_rewards`` summed and ``loss_masks`` joined, in place.

    What a transform changes lands on the row's last action token too.
    """
    before = experience.rewards
    for key in hooks.names("transform_rewards"):
        changed = hooks.call(key, "transform_rewards", experience=experience, rewards=experience.rewards)
        experience.rewards = changed.to(torch.float32)
    if experience.rewards is not before:
        change = experience.rewards - before
        last = experience.action_mask.to(torch.int64).cumsum(-1).argmax(-1, keepdim=True)
        on_last = torch.zeros_like(experience.token_rewards).scatter(1, last, change.unsqueeze(-1))
        experience.token_rewards = experience.token_rewards + torch.where(experience.action_mask, on_last, 0.0)
    parts = [part for _, part in hooks.each("shape_rewards", experience=experience)]
    if parts:
        shaped = torch.stack([part.to(torch.float32) for part in parts]).sum(0)
        experience.shaped = torch.where(experience.action_mask, shaped, 0.0)
    for _, mask in hooks.each("loss_masks", experience=experience):
        experience.loss_mask = experience.loss_mask & mask


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
