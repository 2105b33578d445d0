"""Scoring: each reward plugin judges a group by itself; a failure never counts as zero."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from rlhf_host.config.resolve import EVAL_REWARD
from rlhf_host.config.schema import RolloutConfig
from rlhf_host.errors import LostError
from rlhf_host.hookspecs import Items
from rlhf_host.plugins.answers import other_items
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.records.episodes import Failed, Reward, Trajectory, Unjudged
from rlhf_host.records.metric_names import misnamed
from rlhf_host.records.needs import ScoreContext

AGENT = "agent"

_REWARDS = Items("a reward, a number, Unjudged or None for each trajectory")

_LARGEST = (2 - 2**-23) * 2.0**127

Judges = dict[str, tuple[str, float]]
"""Reward alias → its plugin's key and its weight."""


def judges(manager: PluginManager, split: str) -> Judges:
    """Returns the rewards of a split: in evaluation those of ``eval.reward`` if there are any, else all others."""
    scoring = [manager.by_key[key] for key in manager.names("score")]
    own = [item for item in scoring if item.kind == EVAL_REWARD]
    chosen = own if own and split == "eval" else [item for item in scoring if item.kind != EVAL_REWARD]
    return {item.alias: (item.key, item.weight) for item in chosen}


def brings_signal(manager: PluginManager) -> bool:
    """Returns True if the algorithm learns from something other than rewards, so that a trajectory may have none."""
    return any(not own.rewards for key, own in manager.needs().items() if manager.by_key[key].kind == "algo")


async def score_group(
    manager: PluginManager,
    by: Judges,
    trajectories: Sequence[Trajectory],
    context: ScoreContext,
    settings: RolloutConfig,
    *,
    needless: bool = False,
) -> None:
    """Fills ``rewards``, ``reward``, ``score`` and ``metrics`` of the trajectories, in place.

    Every plugin is called alone, with a deadline and its retries, and judges the final rows. A plugin could not judge if it
    raises, is late, or returns the wrong number of rewards; one trajectory, if its reward is none or not finite. It is then
    unjudged, unless the plugin's weight is zero. Rows that are not final get the values of the final rows of their episode.

    Args:
        needless: if True, a trajectory without a reward counts as 0.
    """
    if not trajectories:
        return
    everything, trajectories = trajectories, [trajectory for trajectory in trajectories if trajectory.final]
    asked = [_ask(manager, key, trajectories, context, settings) for key, _ in by.values()]
    # A task each only where there is something to do side by side: groups come by the hundred.
    answers = [await asked[0]] if len(asked) == 1 else await asyncio.gather(*asked)
    weights = {alias: weight for alias, (_, weight) in by.items()}
    for (alias, (_, weight)), verdicts in zip(by.items(), answers, strict=True):
        for trajectory, verdict in zip(trajectories, verdicts, strict=True):
            if isinstance(verdict, Reward):
                trajectory.rewards[alias] = verdict
                trajectory.metrics.update((name, float(value)) for name, value in verdict.metrics.items())
                continue
            trajectory.rewards[alias] = None
            if weight != 0 and trajectory.unjudged_reason is None:
                trajectory.unjudged_reason = f"{alias}: {verdict.reason}"
    for trajectory in trajectories:
        _total(trajectory, weights, needless)
    if len(trajectories) < len(everything):
        _take_over(everything, weights, needless)


def _take_over(trajectories: Sequence[Trajectory], weights: dict[str, float], needless: bool) -> None:
    """Fills the rows that are not final with the mean reward, by plugin, of the final rows of their episode and role, or else
    of their episode. Rewards that the agent gave such a row itself replace the agent's.
    """
    finals = [row for row in trajectories if row.final]
    for row in (row for row in trajectories if not row.final):
        same = [final for final in finals if final.episode_id == row.episode_id]
        same = [final for final in same if final.role == row.role] or same
        if missed := next((final for final in same if final.unjudged_reason is not None), None):
            row.unjudged_reason = missed.unjudged_reason
            continue
        own = row.agent_rewards.count(None) < len(row.agent_rewards)
        for alias in dict.fromkeys(alias for final in same for alias in final.rewards):
            given = [reward for final in same if (reward := final.rewards.get(alias)) is not None]
            row.rewards[alias] = _mean(given) if given else None
        if own:
            row.rewards.pop(AGENT, None)
        scores = [final.score for final in same if final.score is not None]
        _total(row, {**weights, AGENT: 1.0}, needless)
        row.score = sum(scores) / len(scores) if scores else None


def _mean(rewards: Sequence[Reward]) -> Reward:
    """Returns the mean of several verdicts of one plugin, without their token positions, which are those of other rows."""
    names = dict.fromkeys(name for reward in rewards for name in reward.parts)
    if not all(reward.parts for reward in rewards):
        names = {}
    parts = {name: sum(reward.parts.get(name, 0.0) for reward in rewards) / len(rewards) for name in names}
    return Reward(sum(reward.total for reward in rewards) / len(rewards), parts=parts)


def _total(trajectory: Trajectory, weights: dict[str, float], needless: bool) -> None:
    if trajectory.agent_rewards.count(None) < len(trajectory.agent_rewards):
        turns = [float(reward or 0.0) for reward in trajectory.agent_rewards]
        if not all(map(_fits, turns)):
            trajectory.unjudged_reason = "agent: a reward that is not finite"
        trajectory.rewards[AGENT] = Reward(turns=turns)
        weights = {**weights, AGENT: 1.0}
    if trajectory.unjudged_reason is None and not trajectory.rewards and not needless:
        trajectory.unjudged_reason = "neither a reward plugin nor the agent gave a reward"
    total = scores = whole = 0.0
    for alias, reward in trajectory.rewards.items():
        if reward is None:
            continue
        weight = weights[alias]
        total += weight * reward.total
        placed = reward.turns if reward.turns is not None else reward.tokens
        if placed and not all(_fits(weight * value) for value in placed):
            total = math.inf
        if reward.score is not None and weight != 0:
            scores += abs(weight) * reward.score
            whole += abs(weight)
    if trajectory.unjudged_reason is None and not _fits(total):
        trajectory.unjudged_reason = f"the weighted sum of its rewards, {total:g}, is not finite in float32"
    if trajectory.unjudged_reason is not None:
        trajectory.reward = None
        return
    trajectory.reward = total
    if whole:
        trajectory.score = scores / whole


async def _ask(
    manager: PluginManager, key: str, trajectories: Sequence[Trajectory], context: ScoreContext, settings: RolloutConfig
) -> list[Reward | Unjudged]:
    verdicts: list[Reward | Unjudged] = [Failed("")] * len(trajectories)
    for _ in range(settings.score_retries + 1):
        try:
            timeout_s = settings.score_timeout_s
            # A tuple, because the order of a list might not be that of the answer.
            answer = await manager.acall(key, "score", within_s=timeout_s, trajectories=tuple(trajectories), context=context)
            if (odd := other_items(_REWARDS, answer)) is not None:
                raise TypeError(f"score gave {odd}, expected {_REWARDS}, in the order of the trajectories")
            rewards = list(answer)
            if len(rewards) != len(trajectories):
                raise ValueError(f"{len(rewards)} rewards for {len(trajectories)} trajectories")
            answers = list(map(_judged, rewards, trajectories))
        except TimeoutError:
            answers = [Failed(f"no answer in {settings.score_timeout_s:g} s")] * len(trajectories)
        except Exception as error:
            cause = error.__cause__ or error
            if isinstance(cause, LostError):
                raise cause from error  # it is not the plugin that failed: nothing will be judged any more
            answers = [Failed.by(cause)] * len(trajectories)
        verdicts = [new if isinstance(old, Failed) else old for old, new in zip(verdicts, answers, strict=True)]
        if not any(isinstance(verdict, Failed) for verdict in verdicts):
            break
    return verdicts


def _judged(reward: Any, trajectory: Trajectory) -> Reward | Unjudged:
    try:
        return _as_reward(reward, trajectory)
    except Exception as error:
        return Failed.by(error)


def _as_reward(reward: Any, trajectory: Trajectory) -> Reward | Unjudged:
    if reward is None or isinstance(reward, Unjudged):
        return reward or Unjudged("could not judge")
    if not isinstance(reward, Reward):
        if not isinstance(reward, Real):
            raise TypeError(f"a reward is a Reward, a number, Unjudged or None, not {type(reward).__name__}")
        reward = Reward(value=float(reward))
    if not isinstance(reward.value, float | Real | None):
        raise TypeError(f"a reward's value is a number, not {type(reward.value).__name__}")
    placed = reward.turns if reward.turns is not None else reward.tokens
    if placed is not None:
        expected = len(trajectory.actions) if reward.turns is not None else trajectory.action_length
        if len(placed) != expected:
            raise ValueError(f"{len(placed)} placed rewards, but the trajectory has {expected}")
    elif reward.value is None and not reward.parts:
        return Unjudged("could not judge")
    if reward.score is not None and not 0.0 <= reward.score <= 1.0:
        raise ValueError(f"a score lies in [0, 1], not {reward.score}")
    if not isinstance(reward.feedback, str | None):
        raise TypeError(f"a reward's feedback is a text, not {type(reward.feedback).__name__}")
    if problem := misnamed(reward.parts):
        raise ValueError(f"parts of a reward have {problem}")
    for name, value in reward.metrics.items():
        if not isinstance(name, str):
            raise TypeError(f"the name of a metric is a text, not {name!r}")
        if not isinstance(value, float | Real):  # float first: asking an abstract class takes ten times as long
            raise TypeError(f"metric {name!r} is a number, not {type(value).__name__}")
    if not all(map(_fits, (reward.total, *(placed or ()), *reward.parts.values()))):
        return Unjudged("a reward that is not finite")
    # Other numbers than these have no place in files. In place: a plugin's rewards may be of a class of its own.
    reward.value = None if reward.value is None else float(reward.value)
    reward.turns = None if reward.turns is None else [*map(float, reward.turns)]
    reward.tokens = None if reward.tokens is None else [*map(float, reward.tokens)]
    reward.score = None if reward.score is None else float(reward.score)
    reward.metrics = {name: float(value) for name, value in reward.metrics.items()}
    reward.parts = {name: float(value) for name, value in reward.parts.items()}
    return reward


def _fits(value: float) -> bool:
    """Returns True if the number is finite in float32 too, which batches use."""
    return abs(value) <= _LARGEST
