"""A learning rate that follows the KL divergence of an update, whoever's loss it is."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import Adjust, hookimpl


class FollowKL:
    """Halves the actor's rate while updates move the policy too far, and lets it recover by a twentieth a step."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        lr: float = Field(gt=0, description="the largest rate")
        target: float = Field(1e-3, gt=0, description="kl/update, in nats per token, above which the rate is halved")

    def __init__(self, options: Options):
        self.options = options
        self.lr = options.lr

    @hookimpl
    def step_finished(self, step: int, metrics: Mapping[str, float]) -> Adjust:
        far = metrics["kl/update"] > self.options.target
        self.lr = self.lr / 2 if far else min(self.lr * 1.05, self.options.lr)
        return Adjust({"actor.lr": self.lr})

    @hookimpl
    def state_dict(self) -> dict[str, float]:
        return {"lr": self.lr}

    @hookimpl
    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.lr = state["lr"]
