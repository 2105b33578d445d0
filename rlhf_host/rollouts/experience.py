"""Groups as tensors, ``[B, T]`` over the completion region."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_host.errors import RunError
from rlhf_host.functional import with_siblings
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.records.episodes import Group, Reward, Segment, Trajectory
from rlhf_host.records.tensors import Experience
from rlhf_host.rollouts.scoring import AGENT


def make_experience(
    groups: Sequence[Group], weights: dict[str, float], *, step: int, max_new_tokens: int, temperature: float, version: int = 0
) -> Experience:
    """Returns rows in group order, right-padded.

    Args:
        groups: judged trajectories only.
        weights: reward alias → weight, as ``score_group`` used them.
        version: version of the weights at the start of the step.
    """
    rows = [trajectory for group in groups for trajectory in group.trajectories]
    if any(AGENT in row.rewards for row in rows):
        weights = {**weights, AGENT: 1.0}
    completions = _Completions.of(rows)
    spread = completions.spread
    turn_ids = spread(completions.turns, -1)
    action_mask = turn_ids >= 0
    columns = _reward_columns(rows, weights)
    segments = [segment for row in rows for segment in row.completion]
    names = dict.fromkeys(name for row in rows for name in row.columns)
    token_names = dict.fromkeys(name for segment in segments for name in segment.columns)
    # The roles of an episode are as many episodes in as many groups: none is the baseline of another.
    episodes = _numbered([(row.episode_id, row.role) for row in rows])
    places = {(row.episode_id, row.row): place for place, row in enumerate(rows)}
    parents = [-1 if row.parent is None else places.get((row.episode_id, row.parent), -1) for row in rows]
    return Experience(
        prompt_ids=[row.prompt_ids for row in rows],
        completion_ids=spread(completions.ids),
        completion_mask=completions.mask,
        action_mask=action_mask,
        loss_mask=action_mask.clone(),
        turn_ids=turn_ids,
        group_id=_numbered([(row.group_id, row.role) for row in rows]),
        episode_id=episodes,
        unit_id=episodes.clone(),
        task_index=_tensor([row.task.index for row in rows], np.int64),
        truncated=_tensor([row.truncated for row in rows], np.bool_),
        rewards=_tensor([row.reward for row in rows], np.float32),
        plugin_rewards=_tensor([values for _, values in columns.values()], np.float32).reshape(len(columns), len(rows)).T,
        scores=_tensor([math.nan if row.score is None else row.score for row in rows], np.float32),
        token_rewards=_place_rewards(rows, weights, turn_ids, action_mask),
        sampler_logprobs=spread(completions.logprobs),
        versions=spread(completions.versions),
        version=version,
        reward_names=tuple(columns),
        reward_weights=tuple(weight for weight, _ in columns.values()),
        parent=_tensor(parents, np.int64),
        branch=_tensor([row.branch for row in rows], np.int64),
        columns={name: _tensor([row.columns.get(name, math.nan) for row in rows], np.float32) for name in names},
        token_columns={name: spread(_token_column(segments, name)) for name in token_names},
        step=step,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        trajectories=rows,
    )


@dataclass(frozen=True, slots=True)
class _Completions:
    """The completion tokens of all rows, one after the other. There may be millions."""

    mask: Tensor
    """``[B, T]``: positions of the tokens in their rows."""
    ids: Tensor
    logprobs: Tensor
    versions: Tensor
    turns: Tensor
    """Turn of its row that an action token belongs to; -1 for others."""

    @classmethod
    def of(cls, rows: Sequence[Trajectory]) -> _Completions:
        ids, logprobs, versions = [np.zeros(0, np.int32)], [np.zeros(0, np.float32)], [np.zeros(0, np.int32)]
        turns: list[int] = []
        segment_lengths: list[int] = []
        lengths: list[int] = []
        for row in rows:
            turn, length = 0, 0
            for segment in row.completion:
                acts, count = segment.kind == "action", len(segment.token_ids)
                ids.append(np.asarray(segment.token_ids))
                known = segment.logprobs if acts else np.zeros(count, np.float32)
                logprobs.append(np.asarray(np.full(count, np.nan, np.float32) if known is None else known))
                versions.append(np.asarray((segment.versions if acts else None) or np.zeros(count, np.int32)))
                turns.append(turn if acts else -1)
                segment_lengths.append(count)
                turn += acts
                length += count
            lengths.append(length)
        return cls(
            mask=torch.arange(max(1, *lengths)) < _tensor(lengths, np.int64)[:, None],
            ids=_tensor(np.concatenate(ids), np.int64),
            logprobs=_tensor(np.concatenate(logprobs), np.float32),
            versions=_tensor(np.concatenate(versions), np.int64),
            turns=torch.repeat_interleave(_tensor(turns, np.int64), _tensor(segment_lengths, np.int64)),
        )

    def spread(self, values: Tensor, fill: int = 0) -> Tensor:
        """Returns ``[B, T]``: the values at their tokens' positions, ``fill`` elsewhere."""
        # Where nothing is written zeros take no memory.
        shape = self.mask.shape
        empty = torch.full(shape, fill, dtype=values.dtype) if fill else torch.zeros(shape, dtype=values.dtype)
        return empty.masked_scatter_(self.mask, values)


def _tensor(values: Sequence[Any] | np.ndarray, dtype: Any) -> Tensor:
    """Converts by way of numpy, which reads a list of numbers several times faster than torch."""
    return torch.from_numpy(np.array(values, dtype=dtype))


def _numbered(names: Sequence[Any]) -> Tensor:
    """Returns each name's number, in order of first appearance."""
    numbers: dict[Any, int] = {}
    return _tensor([numbers.setdefault(name, len(numbers)) for name in names], np.int64)


def _token_column(segments: Sequence[Segment], name: str) -> Tensor:
    """Returns one value for each of their tokens, one after the other."""
    parts = [segment.columns.get(name, [math.nan] * len(segment.token_ids)) for segment in segments]
    return _tensor(np.concatenate([np.asarray(part, np.float32) for part in parts]), np.float32)


def _reward_columns(rows: Sequence[Trajectory], weights: dict[str, float]) -> dict[str, tuple[float, list[float]]]:
    """Returns name → weight, and the raw reward of each row (NaN without one), for each plugin, or for each part of its
    rewards.
    """
    columns = {}
    for alias, weight in weights.items():
        rewards = [row.rewards.get(alias) for row in rows]
        for part in dict.fromkeys(part for reward in rewards if reward is not None for part in reward.parts):
            values = [math.nan if reward is None else float(reward.parts.get(part, math.nan)) for reward in rewards]
            columns[f"{alias}.{part}"] = (float(weight), values)
        whole = [math.nan if reward is None or reward.parts else reward.total for reward in rewards]
        if all(reward is None or not reward.parts for reward in rewards) or not all(map(math.isnan, whole)):
            columns[alias] = (float(weight), whole)
    return columns


def _place_rewards(rows: Sequence[Trajectory], weights: dict[str, float], turn_ids: Tensor, action_mask: Tensor) -> Tensor:
    """Returns ``[B, T]``: the weighted rewards at the tokens that the plugin chose, else on the last action token."""
    whole = [0.0] * len(rows)
    placed: list[tuple[int, float, Reward]] = []
    for i, row in enumerate(rows):
        for alias, weight in weights.items():
            reward = row.rewards.get(alias)
            if reward is None or weight == 0:
                continue
            if reward.tokens is None and reward.turns is None:
                whole[i] += weight * reward.total
            else:
                placed.append((i, weight, reward))
    rewards = _on_last_action(_tensor(whole, np.float32), action_mask)
    for i, weight, reward in placed:
        if reward.tokens is not None:
            rewards[i, action_mask[i]] += weight * torch.tensor([float(value) for value in reward.tokens])
        for turn, value in enumerate(reward.turns or () if reward.tokens is None else ()):
            columns = (turn_ids[i] == turn).nonzero()
            if len(columns):
                rewards[i, columns[-1]] += weight * float(value)
    return rewards


def _on_last_action(values: Tensor, action_mask: Tensor) -> Tensor:
    """Converts ``[B]`` to ``[B, T]``: the value is on each row's last action token, if it has one."""
    rows, backwards = torch.arange(len(values)), action_mask.numpy()[:, ::-1]
    last = action_mask.shape[1] - 1 - torch.from_numpy(backwards.argmax(-1))
    out = torch.zeros(action_mask.shape)
    out[rows, last] = torch.where(action_mask[rows, last], values, 0.0)
    return out


def apply_rewards(experience: Experience, hooks: PluginManager) -> None:
    """Applies ``transform_rewards`` in order, then adds ``shape_rewards`` and combines ``loss_masks``, in place.

    The change made by a transform is also added on the row's last action token. Rows whose group is smaller than the plugins
    need are not in the loss, unless a plugin makes the rows to train on.
    """
    before = experience.rewards.clone()
    for key in hooks.names("transform_rewards"):
        changed = hooks.call(key, "transform_rewards", experience=experience, rewards=experience.rewards.clone())
        experience.rewards = _finite(changed, key, "transform_rewards")
    if hooks.has("transform_rewards"):
        change = experience.rewards - before
        experience.token_rewards = experience.token_rewards + _on_last_action(change, experience.action_mask)
    shaped = torch.zeros(experience.action_mask.shape)
    for key, part in hooks.each("shape_rewards", experience=experience):
        on_actions = torch.where(experience.action_mask, part, 0.0)
        shaped = shaped + _finite(on_actions, key, "shape_rewards")
    experience.shaped = shaped
    least = max((needs.min_group_size for needs in hooks.needs().values()), default=1)
    if least > 1 and not hooks.has("make_rows"):
        experience.loss_mask = experience.loss_mask & with_siblings(experience, least)
    apply_masks(experience, hooks)


def apply_masks(experience: Experience, hooks: PluginManager) -> None:
    """Combines ``loss_masks``, in place."""
    for _, mask in hooks.each("loss_masks", experience=experience):
        experience.loss_mask = experience.loss_mask & mask


def _finite(values: Tensor, key: str, hook: str) -> Tensor:
    """Returns float32. Values that are finite may become infinite. Raises ``RunError`` for values that are not finite."""
    values = values.to(torch.float32)
    if not bool(torch.isfinite(values).all()):
        raise RunError(f"{key} gave non-finite numbers from {hook}")
    return values


def reward_metrics(experience: Experience) -> dict[str, float]:
    """Returns rewards, scores, lengths and truncation of a batch for the log; nothing about rewards if there are none. Rewards
    and scores are those of final rows, from which other rows take theirs.
    """
    final = _tensor([row.final for row in experience.trajectories], np.bool_) if experience.trajectories else slice(None)
    rewards = experience.rewards[final].double()
    lengths = experience.action_mask.sum(-1).double()
    values = {"length/mean": lengths.mean(), "length/max": lengths.max(), "truncated": experience.truncated.double().mean()}
    if experience.reward_names:
        values |= {"reward/mean": rewards.mean(), "reward/std": rewards.std(correction=0)}
        values |= {"reward/min": rewards.min(), "reward/max": rewards.max()}
    for column, name in enumerate(experience.reward_names):
        values[f"reward/{name}"] = experience.plugin_rewards[final, column].double().nanmean()
    values["score/mean"] = experience.scores[final].double().nanmean()
    return {name: float(value) for name, value in values.items() if math.isfinite(value)}


def row_means(rows: Iterable[Trajectory]) -> dict[str, float]:
    """Returns means of the metrics that agents, rewards and programs measured per row, over the rows that have them."""
    measured: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.metrics.items():
            measured.setdefault(name, []).append(float(value))
    return {name: sum(values) / len(values) for name, values in measured.items()}


def joined(*parts: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of all parts. Raises ``RunError`` for a name in two of them: a plugin's would hide the host's."""
    whole: dict[str, float] = {}
    for part in parts:
        if both := sorted(whole.keys() & part.keys()):
            raise RunError(f"there are two metrics {both[0]!r}: a plugin's metric needs a name of its own")
        whole |= part
    return whole
