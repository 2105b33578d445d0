"""REINFORCE++ and REINFORCE++-baseline: returns whitened over the whole batch, no critic (arXiv:2501.03262)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rlhf_host import Advantages, Batch, Experience, LossTerm, Metric, Needs, Outputs, hookimpl
from rlhf_host import functional as F

if TYPE_CHECKING:
    from torch import Tensor


class WhitenedOptions(F.PolicyLossOptions):
    whiten: Literal["full", "center", "none"] = Field(
        "full", description="normalise over the batch's action tokens: mean 0 and variance 1, mean 0, or not at all"
    )


class DiscountedOptions(WhitenedOptions):
    gamma: float = Field(1.0, ge=0, le=1, description="discount per action token")


class Whitened:
    """Common parts of the two algorithms: the whitening and the policy loss."""

    def __init__(self, options: WhitenedOptions):
        self.options = options

    def whiten(self, advantages: Tensor, mask: Tensor) -> Tensor:
        """Returns ``[B, T]``, whitened with the statistics of the tokens in ``mask``, 0 elsewhere."""
        if self.options.whiten == "none":
            return advantages.where(mask, 0.0)
        return F.whiten(advantages, mask, center_only=self.options.whiten == "center")

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> list[LossTerm | Metric]:
        return F.policy_loss(outputs, batch, self.options)


class ReinforcePP(Whitened):
    Options = DiscountedOptions
    options: DiscountedOptions

    @hookimpl
    def needs(self) -> Needs:
        return F.policy_needs(self.options)

    @hookimpl
    def compute_advantages(self, experience: Experience) -> Advantages:
        """Computes ``A_it = Σ_{s≥t} γ^{s−t}·(token_reward + shaped)_is`` over action tokens, whitened (eqs. 4 and 5)."""
        rewards, mask = experience.token_rewards.double(), experience.action_mask
        if experience.shaped is not None:
            rewards = rewards + experience.shaped
        returns = F.discounted_sum(rewards, mask, self.options.gamma)
        return Advantages(self.whiten(returns, experience.loss_mask))


class ReinforcePPBaseline(Whitened):
    Options = WhitenedOptions

    @hookimpl
    def needs(self) -> Needs:
        return F.policy_needs(self.options, min_group_size=2)

    @hookimpl
    def compute_advantages(self, experience: Experience) -> Advantages:
        """Computes ``A_it = R_i − mean_g R + Σ_{s≥t} shaped_is`` over action tokens, whitened (eqs. 6 and 7)."""
        mask = experience.action_mask
        relative = F.group_normalize(experience.rewards, experience.group_id, experience.episode_id, std="none")
        advantages = F.on_actions(relative, mask)
        if experience.shaped is not None:
            advantages = advantages + F.suffix_sum(experience.shaped, mask)
        return Advantages(self.whiten(advantages, experience.loss_mask))
