"""Rewards of any kind brought to mean 0 and deviation 1, and kept in a range."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rlhf_host import Experience, RunError, hookimpl
from rlhf_host import functional as F

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["RewardScaling"]

LEAST = 1e-6
"""Least deviation that rewards are divided by."""


class RewardScaling:
    """Rewards with mean 0 and deviation 1, over all so far or over the batch, and limits for them."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

        normalize: Literal["none", "running", "batch"] = Field(
            "none", description="mean and deviation that rewards get: of all rewards so far, or of the batch"
        )
        low: float | None = Field(None, description="least reward, after normalize; null: no limit")
        high: float | None = Field(None, description="largest reward, after normalize; null: no limit")
        reward: str | None = Field(None, description="name of one reward, as in reward/NAME; default: the weighted sum of all")

        @model_validator(mode="after")
        def _does_something(self) -> RewardScaling.Options:
            if self.normalize == "none" and self.low is None and self.high is None:
                raise ValueError("set normalize, low or high: without them rewards stay as they are")
            if self.low is not None and self.high is not None and self.low >= self.high:
                raise ValueError(f"low {self.low:g} has to be below high {self.high:g}")
            return self

    def __init__(self, options: Options):
        self.options = options
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    @hookimpl
    def transform_rewards(self, experience: Experience, rewards: Tensor) -> Tensor:
        """Computes ``clip((r − mean)/std)`` of the rewards ``[B]``, or adds ``w·(clip((x − mean)/std) − x)`` for one reward ``x``
        of weight ``w``. Mean and deviation are over episodes. Rows without that reward stay as they are. Raises ``RunError`` if no
        row has it.
        """
        episodes = experience.episode_id
        if (name := self.options.reward) is None:
            return self._scaled(rewards.double(), episodes).to(rewards.dtype)
        if name not in experience.reward_names:
            raise RunError(f"reward_scaling.reward is {name}, and the rewards are {', '.join(experience.reward_names)}")
        place = experience.reward_names.index(name)
        values = experience.plugin_rewards[:, place].double()
        has = values.isfinite()
        change = values.new_zeros(len(values))
        change[has] = self._scaled(values[has], episodes[has]) - values[has]
        return rewards + (experience.reward_weights[place] * change).to(rewards.dtype)

    def _scaled(self, values: Tensor, episodes: Tensor) -> Tensor:
        each = values.new_tensor([*dict(zip(episodes.tolist(), F.group_mean(values, episodes).tolist(), strict=True)).values()])
        if self.options.normalize == "running":
            for value in each.tolist():  # Welford, 1962
                gap, self.count = value - self.mean, self.count + 1
                self.mean += gap / self.count
                self.squares += gap * (value - self.mean)
            if self.count:
                values = (values - self.mean) / max(math.sqrt(self.squares / self.count), LEAST)
        elif self.options.normalize == "batch" and len(values):
            values = (values - each.mean()) / each.std(correction=0).clamp(min=LEAST)
        if self.options.low is None and self.options.high is None:
            return values
        return values.clamp(self.options.low, self.options.high)

    @hookimpl
    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    @hookimpl
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self.mean, self.squares = int(state["count"]), float(state["mean"]), float(state["squares"])
