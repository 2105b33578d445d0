"""Early stopping: a run ends once its mean reward is good enough."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import Stop, hookimpl


class EarlyStop:
    """Ends the run when ``reward/mean`` reaches ``reward``."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        reward: float = Field(description="mean reward of a batch that is good enough")

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    def step_finished(self, step: int, metrics: Mapping[str, float]) -> Stop | None:
        enough = metrics["reward/mean"] >= self.options.reward
        return Stop(f"the mean reward reached {self.options.reward:g}") if enough else None
