"""Tasks: an environment and a seed."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import Task, hookimpl

HELD_OUT = 1 << 30
"""Added to the seeds of held-out tasks."""


class GymnasiumTasks:
    """The same environment with one seed after another."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        id: str | None = Field(None, description="the environment; default: the agent's")
        prompt: str = Field("Choose an action.", description="text before the first observation: the rules, and how to answer")
        size: int = Field(1000, ge=1, description="training tasks")
        eval_size: int = Field(100, ge=1, description="held-out tasks")

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    def load_tasks(self, split: str, seed: int) -> Sequence[Task]:
        first, count = (0, self.options.size) if split == "train" else (HELD_OUT, self.options.eval_size)
        name = {"id": self.options.id} if self.options.id else {}
        return [Task(self.options.prompt, metadata={"gymnasium": {**name, "seed": first + i}}) for i in range(count)]
