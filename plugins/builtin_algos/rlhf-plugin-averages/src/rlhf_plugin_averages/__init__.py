"""Models whose weights follow the policy's: an average, and a reference that moves."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from rlhf_host import Follow, Needs, RoleNeed, hookimpl

__all__ = ["EMA", "MovingReference"]


class EMA:
    """An exponential moving average of the policy's weights, kept in checkpoints as the role ema."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        decay: float = Field(0.992, ge=0, lt=1, description="part of the average that stays in a step")
        every: PositiveInt = Field(1, description="steps between movements")

        @property
        def follow(self) -> Follow:
            return Follow(1 - self.decay, self.every)

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    def needs(self) -> Needs:
        return Needs(roles=(RoleNeed("ema", source="actor", follows=self.options.follow),))


class MovingReference:
    """A reference that moves towards the policy (TR-DPO, arXiv:2404.09656)."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        share: float = Field(0.6, gt=0, le=1, description="way to the policy that the reference goes; 1: it becomes the policy")
        every: PositiveInt = Field(512, description="steps between movements")

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    def needs(self) -> Needs:
        follows = Follow(self.options.share, self.options.every)
        return Needs(roles=(RoleNeed("reference", source="actor", follows=follows),))
