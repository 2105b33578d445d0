"""On-policy distillation: on what the student says, its distribution is pulled towards a teacher's."""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from rlhf_host import Advantages, AlgoNeeds, Batch, Experience, LossTerm, Output, Outputs, RoleNeed, hookimpl


class Distil:
    """``Σ p_T·(log p_T − log p_S)`` over the teacher's likeliest tokens, or all of them, at every sampled token."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        top: PositiveInt | None = Field(64, description="the teacher's likeliest tokens; none: its whole vocabulary")

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    def needs(self) -> AlgoNeeds:
        return AlgoNeeds(
            data="prompts",
            roles=(RoleNeed("actor", trainable=True, source=None), RoleNeed("teacher", source=None)),
            outputs=(Output("distribution", role="teacher", top=self.options.top),),
            rewards=False,
            on_policy=True,
            weights=None,
        )

    @hookimpl
    def compute_advantages(self, experience: Experience) -> Advantages:
        return Advantages(torch.zeros(experience.action_mask.shape))

    @hookimpl
    def compute_loss(self, role: str, outputs: Outputs, batch: Batch) -> list[LossTerm]:
        if role != "actor":
            return []
        teacher = outputs.others["teacher"]
        there = batch.loss_mask.unsqueeze(-1)
        gap = torch.where(there, teacher.logprobs - teacher.own, 0.0)
        weight = torch.where(there, teacher.logprobs, -torch.inf).exp()
        return [LossTerm("distil", (weight * gap).sum(-1))]
