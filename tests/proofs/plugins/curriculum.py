"""A curriculum: tasks that were solved about half of the time come more often."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import Experience, Task, hookimpl


class Curriculum:
    """Draws with replacement, by a running success rate of every task."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        memory: float = Field(0.5, gt=0, lt=1, description="what a task's rate keeps of the past at each new sample")
        floor: float = Field(0.1, gt=0, description="weight of a task that is always or never solved")

    def __init__(self, options: Options):
        self.options = options
        self.solved: dict[int, float] = {}
        self.dice = random.Random(0)

    @hookimpl
    def draw_tasks(self, tasks: Sequence[Task], count: int, step: int) -> Sequence[int]:
        rates = [self.solved.get(number, 0.5) for number in range(len(tasks))]
        return self.dice.choices(range(len(tasks)), [self.options.floor + 1 - abs(2 * rate - 1) for rate in rates], k=count)

    @hookimpl
    def prepare_batch(self, experience: Experience) -> None:
        memory = self.options.memory
        for row in experience.trajectories:
            before = self.solved.get(row.task.index, 0.5)
            self.solved[row.task.index] = memory * before + (1 - memory) * float(row.score or 0.0)

    @hookimpl
    def state_dict(self) -> dict[str, Any]:
        return {"solved": dict(self.solved), "dice": self.dice.getstate()}

    @hookimpl
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.solved = dict(state["solved"])
        self.dice.setstate(state["dice"])
