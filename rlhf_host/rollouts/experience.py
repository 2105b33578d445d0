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
from rlhf_host.records.needs import AlgoNeeds
from rlhf_host.records.ragged import RaggedTensor, Rows
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
    completions = _Completions.of(rows, version)
    shape = completions.rows
    turn_ids = RaggedTensor(completions.turns, shape, -1, torch.int64)
    action_mask = RaggedTensor(completions.turns >= 0, shape)
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
        completion_ids=RaggedTensor(completions.ids, shape, dtype=torch.int64),
        completion_mask=shape.mask(),
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
        token_rewards=_place_rewards(rows, weights, completions),
        sampler_logprobs=RaggedTensor(completions.logprobs, shape),
        versions=RaggedTensor(completions.versions, shape, dtype=torch.int64),
        version=version,
        reward_names=tuple(columns),
        reward_weights=tuple(weight for weight, _ in columns.values()),
        parent=_tensor(parents, np.int64),
        branch=_tensor([row.branch for row in rows], np.int64),
        columns={name: _tensor([row.columns.get(name, math.nan) for row in rows], np.float32) for name in names},
        token_columns={name: RaggedTensor(_token_column(segments, name), shape) for name in token_names},
        step=step,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        images=images if any(images := [row.shown for row in rows]) else None,
        traces=traces if any(traces := [row.traces for row in rows]) else None,
        trajectories=rows,
    )


@dataclass(frozen=True, slots=True)
class _Completions:
    """The completion tokens of all rows, one after the other. There may be hundreds of millions."""

    rows: Rows
    ids: Tensor
    """``[N]`` int32, as versions and turns."""
    logprobs: Tensor
    versions: Tensor
    turns: Tensor
    """Turn of its row that an action token belongs to; -1 for others."""

    @classmethod
    def of(cls, rows: Sequence[Trajectory], version: int) -> _Completions:
        counts = [[len(segment.token_ids) for segment in row.completion] for row in rows]
        lengths = np.array([sum(own) for own in counts], np.int64)
        total = int(lengths.sum())
        ids, versions = np.zeros(total, np.int32), np.zeros(total, np.int32)
        logprobs, turns = np.zeros(total, np.float32), np.full(total, -1, np.int32)
        end = 0
        for row, own in zip(rows, counts, strict=True):
            turn = 0
            for segment, count in zip(row.completion, own, strict=True):
                place = slice(end, end := end + count)
                ids[place] = segment.token_ids
                if segment.kind != "action":
                    continue
                logprobs[place] = np.nan if segment.logprobs is None else segment.logprobs
                versions[place] = segment.versions or version  # what was not sampled does not age
                turns[place] = turn
                turn += 1
        of_rows = Rows(lengths, max(1, *lengths.tolist()) if len(rows) else 1)
        return cls(of_rows, *map(torch.from_numpy, (ids, logprobs, versions, turns)))


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


def _place_rewards(rows: Sequence[Trajectory], weights: dict[str, float], completions: _Completions) -> Tensor:
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
    rewards = _on_last_action(_tensor(whole, np.float32), completions.turns >= 0, completions.rows)
    for i, weight, reward in placed:
        place = completions.rows.slice(i)
        tokens, turn_ids = rewards[place], completions.turns[place]
        if reward.tokens is not None:
            tokens[turn_ids >= 0] += weight * torch.tensor([float(value) for value in reward.tokens])
        for turn, value in enumerate(reward.turns or () if reward.tokens is None else ()):
            columns = (turn_ids == turn).nonzero()
            if len(columns):
                tokens[columns[-1]] += weight * float(value)
    return RaggedTensor(rewards, completions.rows)


def _on_last_action(values: Tensor, actions: Tensor, rows: Rows) -> Tensor:
    """Converts ``[B]`` to the rows' tokens, ``[N]``: the value is on each row's last action token, if it has one.

    Args:
        actions: ``[N]`` bool.
    """
    out = torch.zeros(rows.count)
    for row, value in enumerate(values.tolist()):
        place = rows.slice(row)
        backwards = actions[place].numpy()[::-1]
        if backwards.any():
            out[place.stop - 1 - int(backwards.argmax())] = value
    return out


def apply_rewards(experience: Experience, hooks: PluginManager) -> None:
    """Applies ``transform_rewards`` in order, then adds ``shape_rewards`` and combines ``loss_masks``, in place.

    The change made by a transform is also added on the row's last action token. Rows whose group is smaller than the plugins
    need are not in the loss, unless a plugin makes the rows to train on.
    """
    before, shape = experience.rewards.clone(), Rows.of(experience.completion_mask)
    for key in hooks.names("transform_rewards"):
        changed = hooks.call(key, "transform_rewards", experience=experience, rewards=experience.rewards.clone())
        experience.rewards = _finite(changed, key, "transform_rewards")
    if hooks.has("transform_rewards"):
        change = _on_last_action(experience.rewards - before, shape.tokens(experience.action_mask), shape)
        experience.token_rewards = experience.token_rewards + RaggedTensor(change, shape)
    shaped: Tensor = shape.zeros()
    for key, part in hooks.each("shape_rewards", experience=experience):
        on_actions = torch.where(experience.action_mask, shape.ragged(part), 0.0)
        shaped = shaped + _finite(on_actions, key, "shape_rewards")
    experience.shaped = shaped
    least = max((needs.min_group_size for needs in hooks.needs().values()), default=1)
    if least > 1 and not hooks.has("make_rows"):
        experience.loss_mask = experience.loss_mask & with_siblings(experience, least)
    apply_masks(experience, hooks)


def apply_masks(experience: Experience, hooks: PluginManager) -> None:
    """Combines ``loss_masks``, in place. A unit whose rows train together, such as a pair, goes with its row."""
    shape, before = Rows.of(experience.completion_mask), experience.loss_mask.any(-1)
    for _, mask in hooks.each("loss_masks", experience=experience):
        experience.loss_mask = experience.loss_mask & shape.ragged(mask)
    gone = experience.unit_id[before & ~experience.loss_mask.any(-1)]
    if len(gone) and any(AlgoNeeds.of(own).unit_rows for own in hooks.needs().values()):
        experience.loss_mask = experience.loss_mask & ~torch.isin(experience.unit_id, gone)[:, None]


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
