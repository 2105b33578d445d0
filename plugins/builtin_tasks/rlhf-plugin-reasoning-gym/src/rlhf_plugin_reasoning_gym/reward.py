"""The reward of these tasks: each data set judges its own answers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import regex
from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import Reward, ScoreContext, Trajectory, Unjudged, UserError, hookimpl
from rlhf_plugin_reasoning_gym.datasets import made

PATTERN_S = 1.0
"""Maximum seconds of a search for the pattern in one answer: some patterns take for ever on some texts."""


class ReasoningGymReward:
    """The result of the data set's own ``score_answer``, in [0, 1]."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        pattern: str | None = Field(
            None,
            description="what of the answer counts: a regular expression, its first group if it has one; default: all of it",
        )

    def __init__(self, options: Options):
        try:
            self.pattern = regex.compile(options.pattern, regex.S) if options.pattern is not None else None
        except (regex.error, RecursionError) as error:
            raise UserError(f"reasoning_gym: pattern is no regular expression: {error}") from error

    @hookimpl
    def score(self, trajectories: Sequence[Trajectory], context: ScoreContext) -> list[Reward | Unjudged]:
        return [self._judge(trajectory) for trajectory in trajectories]

    def _judge(self, trajectory: Trajectory) -> Reward | Unjudged:
        where: Any = trajectory.task.metadata.get("reasoning_gym")
        if not isinstance(where, dict) or "dataset" not in where:
            return Unjudged("the task is none of reasoning_gym's")
        name = str(where["dataset"])
        try:
            data = made(name, int(where["seed"]), int(where["size"]), json.dumps(where.get("config") or {}, sort_keys=True))
            score = float(data.score_answer(self._answer(trajectory.last_text), data[int(where["index"])]))
        except Exception as error:
            return Unjudged(f"{name}: {type(error).__name__}: {error}")
        if not math.isfinite(score):
            return Unjudged(f"{name} gave {score}")
        score = min(1.0, max(0.0, score))
        metrics = {f"reasoning_gym/{name}": score}
        if "level" in where:
            metrics[f"reasoning_gym/{name}/level"] = float(where["level"])
        return Reward(score, score=score, metrics=metrics)

    def _answer(self, text: str) -> str | None:
        """Returns the answer; None if it is not where it should be, which scores 0."""
        if self.pattern is None:
            return text.strip()
        try:
            found = list(self.pattern.finditer(text, timeout=PATTERN_S, concurrent=True))
        except TimeoutError:
            return None
        return None if not found else ((found[-1][1] if self.pattern.groups else found[-1][0]) or "").strip()
