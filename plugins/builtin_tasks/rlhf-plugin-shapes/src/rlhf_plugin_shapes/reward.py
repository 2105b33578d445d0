"""The reward of these tasks: the answer, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from rlhf_host import Reward, ScoreContext, Trajectory, Unjudged, hookimpl


class ShapesReward:
    """1 if the answer is the label, apart from white space around it, else 0."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

    def __init__(self, options: Options):
        pass

    @hookimpl
    def score(self, trajectories: Sequence[Trajectory], context: ScoreContext) -> list[Reward | Unjudged]:
        return [self._judge(trajectory) for trajectory in trajectories]

    def _judge(self, trajectory: Trajectory) -> Reward | Unjudged:
        label = trajectory.task.ground_truth
        if label is None:
            return Unjudged("the task has no label")
        value = float(trajectory.last_text.strip() == str(label).strip())
        return Reward(value, score=value)
