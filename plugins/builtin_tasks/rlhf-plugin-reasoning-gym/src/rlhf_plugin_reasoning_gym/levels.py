"""Tasks that are generated while training, at a level that follows the policy's success."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator, model_validator

from rlhf_host import Group, Task, UserError, hookimpl
from rlhf_plugin_reasoning_gym.datasets import curriculum, made
from rlhf_plugin_reasoning_gym.tasks import HELD_OUT, shares_of


@dataclasses.dataclass(slots=True)
class Level:
    """Where a data set is."""

    level: int = 0
    made: int = 0
    """Problems that were generated so far, at any level."""
    drawn: int = 0
    means: list[float] = dataclasses.field(default_factory=list)
    """Mean scores of the groups at this level."""


class ReasoningGymLevels:
    """Problems of one data set or several, each generated when it is drawn, at a level of reasoning-gym's own curriculum that rises
    while the policy solves it and falls while it does not."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        datasets: list[str] = Field(description="names of reasoning-gym's data sets that have a curriculum; NAME@WEIGHT")
        groups: PositiveInt = Field(16, description="groups of a level before it may change")
        rise: float = Field(0.7, gt=0, le=1, description="mean score of these groups from which the level rises")
        fall: float = Field(0.1, ge=0, lt=1, description="mean score of these groups up to which the level falls")
        level: int = Field(0, ge=0, description="first level")
        most: int | None = Field(None, ge=0, description="highest level; default: the last of the data set's curriculum")
        eval_size: PositiveInt = Field(100, description="held-out tasks in all, over the levels from the first to the highest")
        seed: int = Field(0, ge=0, lt=HELD_OUT, description="of the problems")
        instruction: str = Field("", description="text behind every question")

        @field_validator("datasets", mode="before")
        @classmethod
        def _several(cls, value: Any) -> Any:
            return value.split(",") if isinstance(value, str) else value

        @model_validator(mode="after")
        def _ordered(self) -> ReasoningGymLevels.Options:
            if self.fall >= self.rise:
                raise ValueError(f"fall {self.fall:g} is not below rise {self.rise:g}")
            if self.most is not None and self.level > self.most:
                raise ValueError(f"level {self.level} is above most {self.most}")
            return self

    def __init__(self, options: Options):
        self.options = options
        self.shares = shares_of(options.datasets)
        self.levels = {name: Level(options.level) for name in self.shares}

    @hookimpl
    def load_tasks(self, split: str, seed: int) -> Iterator[Task] | list[Task]:
        """Returns an endless stream: each task is made when it is drawn. For evaluation problems of all levels, in turns."""
        tops = {name: self._top(name) for name in self.shares}
        if split == "train":
            return self._stream()
        first, names = self.options.seed + HELD_OUT, [*self.shares]
        tasks = []
        for number in range(self.options.eval_size):
            name = names[number % len(names)]
            levels = range(self.options.level, tops[name] + 1)
            tasks.append(self._task(name, levels[number // len(names) % len(levels)], first, number))
        return tasks

    def _top(self, name: str) -> int:
        top = curriculum(name).top
        top = top if self.options.most is None else min(top, self.options.most)
        if self.options.level > top:
            raise UserError(f"reasoning_gym_levels: {name} has the levels 0 to {top}, and level is {self.options.level}")
        return top

    def _stream(self) -> Iterator[Task]:
        while True:
            name = min(self.levels, key=lambda name: (self.levels[name].drawn + 1) / self.shares[name])
            where = self.levels[name]
            where.drawn, where.made = where.drawn + 1, where.made + 1
            yield self._task(name, where.level, self.options.seed, where.made - 1)

    def _task(self, name: str, level: int, seed: int, index: int) -> Task:
        config = curriculum(name).config(level)
        entry = made(name, seed + index, 1, json.dumps(config, sort_keys=True))[0]
        question = entry["question"] + (f"\n{self.options.instruction}" if self.options.instruction else "")
        where = {"dataset": name, "seed": seed + index, "size": 1, "index": 0, "config": config, "level": level}
        return Task(question, entry.get("answer"), {"reasoning_gym": where})

    @hookimpl
    def keep_group(self, group: Group) -> bool:
        """Notes the group's mean score, and keeps it."""
        where = group.task.metadata.get("reasoning_gym")
        if isinstance(where, Mapping) and "level" in where and group.trajectories:
            level = self.levels.get(where["dataset"])
            scores = [row.score for row in group.trajectories if row.score is not None]
            if level is not None and level.level == where["level"] and scores:
                level.means.append(statistics.fmean(scores))
        return True

    @hookimpl
    def step_finished(self) -> None:
        """Levels change between steps only, so that they do not depend on which group of a step ends first."""
        for name, where in self.levels.items():
            if len(where.means) < self.options.groups:
                continue
            mean, top = statistics.fmean(where.means), self._top(name)
            change = (mean >= self.options.rise) - (mean <= self.options.fall)
            where.level = min(top, max(self.options.level, where.level + change))
            where.means = []

    @hookimpl
    def state_dict(self) -> dict[str, Any]:
        return {name: dataclasses.asdict(where) for name, where in self.levels.items()}

    @hookimpl
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.keys() != self.levels.keys():
            raise UserError(f"reasoning_gym_levels: the checkpoint has {', '.join(state)}: resume with the same datasets")
        self.levels = {name: Level(**values) for name, values in state.items()}
