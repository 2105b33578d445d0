"""RLOO: REINFORCE with the mean of the group's other samples as baseline (arXiv:2402.14740)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_host import Advantages, Batch, Experience, LossTerm, Metric, Needs, Outputs, hookimpl
from rlhf_host import functional as F


class Options(F.PolicyLossOptions):
    kl_placement: Literal["sequence", "suffix"] = Field(
        "sequence", description="KL in the reward: with the baseline, or per token without it"
    )


class RLOO:
    Options = Options

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    def needs(self) -> Needs:
        return F.policy_needs(self.options, min_group_size=2)

    @hookimpl
    def compute_advantages(self, experience: Experience) -> Advantages:
        """``A_i = R̃_i − mean_{j≠i} R̃_j`` on every action token, ``R̃_i = R_i + Σ_t shaped_it``."""
        rewards, mask, shaped = experience.rewards, experience.action_mask, experience.shaped
        if shaped is not None and self.options.kl_placement == "sequence":
            rewards = rewards + F.masked_sum(shaped, mask, -1)
        relative = F.leave_one_out(rewards, experience.group_id, experience.episode_id)
        advantages = F.on_actions(relative, mask)
        if shaped is not None and self.options.kl_placement == "suffix":
            advantages = advantages + F.suffix_sum(shaped, mask)
        return Advantages(advantages)

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> list[LossTerm | Metric]:
        return F.policy_loss(outputs, batch, self.options)
