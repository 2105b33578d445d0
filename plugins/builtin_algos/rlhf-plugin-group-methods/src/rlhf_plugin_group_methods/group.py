"""Parts that several of the algorithms have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import Advantages, AlgoNeeds, Batch, Experience, LossTerm, Metric, Outputs, RoleNeed, hookimpl
from rlhf_host import functional as F

if TYPE_CHECKING:
    from torch import Tensor


def rewards_of(experience: Experience) -> Tensor:
    """Returns ``R̃_i = R_i + Σ_t shaped_it``, ``[B]`` float64: with the KL of a row, if it is placed in the reward."""
    rewards = experience.rewards.double()
    if experience.shaped is None:
        return rewards
    return rewards + F.masked_sum(experience.shaped.double(), experience.action_mask, -1)


class Estimator:
    """An algorithm that changes the advantages alone: it works with every policy loss."""

    def __init__(self, options: F.PolicyLossOptions):
        self.options = options

    @hookimpl
    def needs(self) -> AlgoNeeds:
        return F.policy_needs(self.options, min_group_size=2)

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> list[LossTerm | Metric]:
        return F.policy_loss(outputs, batch, self.options)


class LossOptions(BaseModel):
    """Options of an algorithm with a loss of its own and GRPO's advantages."""

    model_config = ConfigDict(extra="forbid")

    std: Literal["group", "batch", "none"] = Field(
        "group", description="divide advantages by the standard deviation of the group, of the batch, or not at all"
    )
    std_eps: float = Field(1e-6, ge=0, description="added to the standard deviation")


class OwnLoss:
    """An algorithm with GRPO's advantages and a loss of its own."""

    weights: Literal["token", "row"] | None = "token"
    """The ``importance_weights`` that its loss takes."""

    def __init__(self, options: LossOptions):
        self.options = options

    @hookimpl
    def needs(self) -> AlgoNeeds:
        actor = RoleNeed("actor", trainable=True, source=None)
        return AlgoNeeds(data="prompts", roles=(actor,), min_group_size=2, weights=self.weights)

    @hookimpl
    def compute_advantages(self, experience: Experience) -> Advantages:
        """Computes ``A_i = (R̃_i − mean_g R̃) / (std + ε)`` on every action token (arXiv:2402.03300, section 4.1.2)."""
        groups, episodes, options = experience.group_id, experience.episode_id, self.options
        values = F.group_normalize(rewards_of(experience), groups, episodes, std=options.std, eps=options.std_eps)
        return Advantages(F.on_actions(values, experience.action_mask))
