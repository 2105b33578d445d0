"""Tasks of several data sets, mixed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rlhf_host import Task, UserError, hookimpl
from rlhf_plugin_reasoning_gym.datasets import made

HELD_OUT = 1 << 30
"""Added to the seed of held-out tasks. An item's own seed is the data set's plus its index, so near seeds share most items."""


class ReasoningGym:
    """Generated problems of one data set or several, in turns."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        datasets: list[str] = Field(description="names of reasoning-gym's data sets; NAME@WEIGHT for more than one share")
        size: int = Field(1000, ge=1, description="training tasks in all")
        eval_size: int = Field(100, ge=1, description="held-out tasks in all")
        seed: int = Field(0, ge=0, lt=HELD_OUT, description="of the problems; the run's own seed sets their order alone")
        config: str = Field("{}", description='settings by data set, as JSON: {"chain_sum": {"max_terms": 3}}')
        instruction: str = Field("", description="text behind every question, such as 'Put the answer into <answer></answer>.'")

        @field_validator("datasets", mode="before")
        @classmethod
        def _several(cls, value: Any) -> Any:
            return value.split(",") if isinstance(value, str) else value

    def __init__(self, options: Options):
        self.options = options
        self.shares = shares_of(options.datasets)
        try:
            self.config = json.loads(options.config)
        except ValueError as error:
            raise UserError(f"reasoning_gym: config is no JSON: {error}") from error
        if not isinstance(self.config, dict):
            raise UserError("reasoning_gym: config is no JSON object")
        if unknown := [name for name in self.config if name not in self.shares]:
            raise UserError(
                f"reasoning_gym: config has settings of {', '.join(unknown) or 'no data set'}, which is not among datasets"
            )

    @hookimpl
    def load_tasks(self, split: str, seed: int) -> Sequence[Task]:
        """Returns tasks of each data set according to its share, mixed evenly."""
        count = self.options.size if split == "train" else self.options.eval_size
        first = self.options.seed + (HELD_OUT if split == "eval" else 0)
        whole = sum(self.shares.values())
        sizes = {name: max(1, round(count * share / whole)) for name, share in self.shares.items()}
        tasks: list[tuple[float, Task]] = []
        for name, size in sizes.items():
            settings = self.config.get(name, {})
            generated = made(name, first, size, json.dumps(settings, sort_keys=True))
            for index in range(size):
                entry = generated[index]
                where = {"dataset": name, "seed": first, "size": size, "index": index, "config": settings}
                question = entry["question"] + (f"\n{self.options.instruction}" if self.options.instruction else "")
                tasks.append(((index + 0.5) / size, Task(question, entry.get("answer"), {"reasoning_gym": where})))
        return [task for _, task in sorted(tasks, key=lambda pair: pair[0])]


def shares_of(datasets: Sequence[str]) -> dict[str, float]:
    """Returns name → weight. Raises ``UserError`` if there are none."""
    if not datasets:
        raise UserError("reasoning_gym: name data sets, as --data.reasoning_gym.datasets chain_sum")
    shares = dict(map(_share, datasets))
    if len(shares) < len(datasets):
        raise UserError(f"reasoning_gym: {','.join(datasets)} has a name twice: give it once, with a weight, as in NAME@2")
    return shares


def _share(text: str) -> tuple[str, float]:
    name, _, weight = text.partition("@")
    try:
        share = float(weight or 1)
    except ValueError:
        share = 0.0
    if not 0 < share < math.inf:
        raise UserError(f"reasoning_gym: {text!r}: a weight is a number above 0, as in {name}@2")
    return name, share
