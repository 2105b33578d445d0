"""Common parts of the three algorithms: groups of two or more, an actor, a policy loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host import Batch, Experience, LossTerm, Metric, Needs, Outputs, hookimpl
from rlhf_host import functional as F

if TYPE_CHECKING:
    from torch import Tensor


class GroupRelative:
    """Everything but the advantages."""

    def __init__(self, options: F.PolicyLossOptions):
        self.options = options

    @hookimpl
    def needs(self) -> Needs:
        return F.policy_needs(self.options, min_group_size=2)

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> list[LossTerm | Metric]:
        return F.policy_loss(outputs, batch, self.options)


def shaped_sums(experience: Experience) -> Tensor:
    """Returns ``Σ_t shaped_it``, ``[B]`` float64: the KL of a row, if it is placed in the reward."""
    if experience.shaped is None:
        return experience.rewards.double().new_zeros(len(experience))
    return F.masked_sum(experience.shaped.double(), experience.action_mask, -1)


def sequence_rewards(experience: Experience) -> Tensor:
    """Returns ``R̃_i = R_i + Σ_t shaped_it``, ``[B]`` float64."""
    return experience.rewards.double() + shaped_sums(experience)
