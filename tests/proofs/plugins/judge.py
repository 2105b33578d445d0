"""A judge with two objectives: vowels, and an end within few characters; it reads no numbers."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import Reward, Trajectory, Unjudged, hookimpl


class Judge:
    """Each objective is a part of the reward."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        length: int = Field(6, gt=0, description="characters that are short enough")

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    async def score(self, trajectories: Sequence[Trajectory]) -> list[Reward | Unjudged]:
        return [self.judge(trajectory.text) for trajectory in trajectories]

    def judge(self, text: str) -> Reward | Unjudged:
        if text[:1].isdigit():
            return Unjudged("it begins with a number")
        vowels = sum(character in "aeiou" for character in text) / max(1, len(text))
        short = 0.5 * (len(text) <= self.options.length)
        return Reward(parts={"vowels": vowels, "short": short}, score=vowels)
