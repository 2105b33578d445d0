"""Parts of DAPO (arXiv:2503.14476) around the loss: filter groups without signal, and treat answers that ran out of tokens."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rlhf_host import Drop, Experience, Group, Needs, UserError, hookimpl

if TYPE_CHECKING:
    from torch import Tensor


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid")


class DynamicFiltering:
    """Drops groups that are all right or all wrong: keeps one if the mean of its 0-1 scores is strictly inside ``(low, high)``
    (section 3.2, eq. 11). The host draws another for each that is dropped."""

    class Options(_Options):
        low: float = Field(0.0, ge=0, lt=1, description="groups with a mean score at or below it are dropped (too_hard)")
        high: float = Field(1.0, gt=0, le=1, description="groups with a mean score at or above it are dropped (too_easy)")
        min_std: float | None = Field(
            None,
            ge=0,
            description="also drop groups whose rewards have at most this standard deviation (no_spread); default: off",
        )

        @model_validator(mode="after")
        def _ordered(self) -> DynamicFiltering.Options:
            if self.low >= self.high:
                raise ValueError(f"low {self.low:g} is not below high {self.high:g}: no group could be kept")
            return self

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    def needs(self) -> Needs:
        return Needs(min_group_size=2)

    @hookimpl
    def check_run(self, config: Mapping[str, Any]) -> None:
        if not config["reward"] and config["agent"]["name"] == "single_turn" and config["from_trajectories"] is None:
            raise UserError(
                "it keeps groups whose rewards differ, and the run has no reward: give --reward NAME, or leave it out"
            )

    @hookimpl
    def keep_group(self, group: Group) -> bool | Drop:
        """Keeps or drops a group. An episode's several trajectories count once. Groups of equal rewards are dropped, whatever
        their scores; if any trajectory has no score, that is the only rule.

        Raises:
            UserError: scores are missing, and ``low`` or ``high`` were set to compare them.
        """
        options = self.options
        rewards = _per_episode((t.episode_id, t.reward or 0.0) for t in group.trajectories)
        if len(rewards) < 2:
            return Drop("alone")
        scores = [trajectory.score for trajectory in group.trajectories]
        scored = None not in scores
        if scored:
            mean = statistics.fmean(_per_episode(zip((t.episode_id for t in group.trajectories), scores, strict=True)))
            if mean <= options.low:
                return Drop("too_hard")
            if mean >= options.high:
                return Drop("too_easy")
        elif (options.low, options.high) != (0.0, 1.0):
            raise UserError("low and high are bounds of 0-1 scores, and the rewards give none: use min_std alone")
        equal = max(rewards) - min(rewards) <= 1e-6 * max(1.0, *map(abs, rewards))
        if equal or (options.min_std is not None and statistics.stdev(rewards) <= options.min_std):
            return Drop("no_spread")
        return True


class OverlongPenalty:
    """Penalises long answers: adds ``−f·clip((len − (L_max − L_buf))/L_buf, 0, 1)`` to the reward, ``len`` in action tokens
    (section 3.4, eq. 13)."""

    class Options(_Options):
        buffer: int | None = Field(
            None, gt=0, description="tokens before max_length over which the penalty grows; default: a fifth of max_length"
        )
        factor: float = Field(1.0, ge=0, description="penalty at max_length")
        max_length: int | None = Field(None, gt=0, description="longest answer in tokens; default: rollout.max_new_tokens")

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    def check_run(self, config: Mapping[str, Any]) -> None:
        self._lengths(config["rollout"]["max_new_tokens"])

    @hookimpl
    def transform_rewards(self, experience: Experience, rewards: Tensor) -> Tensor:
        longest, buffer = self._lengths(experience.max_new_tokens)
        lengths = experience.action_mask.sum(-1).to(rewards.dtype)
        return rewards - self.options.factor * ((lengths - (longest - buffer)) / buffer).clamp(0, 1)

    def _lengths(self, max_new_tokens: int) -> tuple[int, float]:
        longest = self.options.max_length or max_new_tokens
        buffer = self.options.buffer or longest / 5
        if buffer > longest:
            raise UserError(f"buffer {buffer} is longer than the longest answer of {longest} tokens: lower it")
        return longest, buffer


class OverlongMasking:
    """Takes truncated answers out of the loss and its denominator; group statistics still count them (section 3.4, there
    overlong filtering)."""

    Options = _Options

    def __init__(self, options: _Options):
        self.options = options

    @hookimpl
    def loss_masks(self, experience: Experience) -> Tensor:
        return experience.action_mask & ~experience.truncated.unsqueeze(-1)


class StopProperly:
    """Lowers the reward of truncated answers: positive ones are multiplied by ``coef`` (OpenRLHF's stop-properly penalty)."""

    class Options(_Options):
        coef: float = Field(0.0, ge=0, le=1, description="share of its positive reward that a truncated answer keeps")

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    def transform_rewards(self, experience: Experience, rewards: Tensor) -> Tensor:
        return rewards.where(~(experience.truncated & (rewards > 0)), rewards * self.options.coef)


def _per_episode(values: Iterable[tuple[str, float]]) -> list[float]:
    """Returns the mean of each episode."""
    episodes: dict[str, list[float]] = defaultdict(list)
    for episode, value in values:
        episodes[episode].append(value)
    return [statistics.fmean(found) for found in episodes.values()]
