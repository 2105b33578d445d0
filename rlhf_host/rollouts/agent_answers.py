"""Checks and conversion of an agent's results: steps, trajectories, rewards and metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, get_args

from rlhf_host.records.episodes import Episode, FinishReason, Step, Trajectory
from rlhf_host.rollouts.policy import foreign


def trajectory_problem(trajectory: Trajectory, episode: Episode, vocabulary: int) -> str:
    """Returns what is wrong with an agent's own trajectory, or an empty string."""
    if not isinstance(trajectory, Trajectory):
        return f"gave a {type(trajectory).__name__} from agent_run, expected Trajectory"
    if trajectory.group_id != episode.group_id or trajectory.episode_id != episode.episode_id:
        return "gave a trajectory without the episode's own group_id and episode_id from agent_run"
    if not trajectory.segments or trajectory.segments[0].kind != "prompt":
        return "gave a trajectory that does not begin with its prompt segment from agent_run"
    if trajectory.finish_reason not in get_args(FinishReason):
        known = ", ".join(get_args(FinishReason))
        return f"gave the finish_reason {trajectory.finish_reason!r} from agent_run; it is one of {known}"
    for segment in trajectory.segments:
        if problem := foreign(segment.token_ids, vocabulary):
            return f"gave a segment from agent_run whose {problem}"
    for segment in trajectory.actions:
        count = len(segment.token_ids)
        if len(segment.logprobs or ()) != count or len(segment.versions or ()) != count:
            return "gave an action segment from agent_run where some tokens lack their log-probability or version"
        if count and not math.isfinite(sum(segment.logprobs or ())):
            return "gave an action segment from agent_run with log-probabilities that are not finite"
    return ""


def step_problem(step: Step, vocabulary: int) -> str:
    """Returns what is wrong with a step, or an empty string."""
    seen = step.observation
    if hasattr(seen, "tolist"):
        step.observation = seen = seen.tolist()  # type: ignore[union-attr]
    if seen is not None and not isinstance(seen, str):
        if not isinstance(seen, Sequence) or not seen:
            return f"gave an observation of the type {type(seen).__name__}; it is a text, messages or token ids"
        if is_tokens(seen) and (problem := foreign(seen, vocabulary)):  # type: ignore[arg-type]
            return f"gave an observation whose {problem}"
        if not is_tokens(seen) and not all(isinstance(one, Mapping) and "role" in one for one in seen):
            return f"gave the observation {str(seen)[:60]}; it is a text, messages with a role each, or token ids"
    if not isinstance(step.metrics, Mapping):
        return f"gave metrics of the type {type(step.metrics).__name__}"
    return ""


def told_problem(row: Trajectory) -> str:
    """Returns what is wrong with the rewards, score or metrics that an agent gives a row, or an empty string. Converts them to
    types that files can hold.
    """
    for name, value in row.metrics.items():
        if not isinstance(name, str):
            return f"gave a metric with the name {name!r}; a name is a text"
        if not isinstance(value, float | Real):  # float first: asking an abstract class takes ten times as long
            return f"gave {value!r} as the metric {name!r}; a metric is a number"
    if not isinstance(row.agent_rewards, list) or len(row.agent_rewards) > len(row.actions):
        return f"gave the agent_rewards {row.agent_rewards!r} for {len(row.actions)} turns: a list, a number or None for each"
    if odd := [value for value in row.agent_rewards if not isinstance(value, float | Real | None)]:
        return f"gave {odd[0]!r} as a reward; a reward is a number"
    if row.score is not None and not (isinstance(row.score, float | Real) and 0.0 <= row.score <= 1.0):
        return f"gave the score {row.score!r}; a score lies in [0, 1]"
    row.metrics = {name: float(value) for name, value in row.metrics.items()}
    row.agent_rewards = [None if value is None else float(value) for value in row.agent_rewards]
    row.score = None if row.score is None else float(row.score)
    return ""


def branch_problem(row: Trajectory, rows: Sequence[Trajectory]) -> str:
    """Returns what is wrong with a row that does not begin as the row it claims to branch from, or an empty string."""
    if row.parent is None:
        return ""
    if not 0 <= row.parent < row.row:
        return f"gave row {row.row} with the parent {row.parent}; that is the index of an earlier row of its episode"
    tokens = [token for segment in rows[row.parent].segments for token in segment.token_ids]
    branch, prompt = row.branch, row.prompt_ids
    if not 0 < branch <= min(len(tokens), len(prompt)) or tokens[:branch] != prompt[:branch]:
        return f"gave row {row.row}, which does not begin with the first {branch} tokens of row {row.parent}"
    return ""


def is_tokens(value: Any) -> bool:
    return not isinstance(value, str) and len(value) > 0 and isinstance(value[0], int)
