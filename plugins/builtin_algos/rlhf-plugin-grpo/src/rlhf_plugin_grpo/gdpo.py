"""GDPO: each reward normalised on its own, so that none dominates (arXiv:2601.05242)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from rlhf_host import Advantages, Experience, hookimpl
from rlhf_host import functional as F
from rlhf_plugin_grpo.group import GroupRelative, shaped_sums

if TYPE_CHECKING:
    from torch import Tensor

_ROUNDING = 1e-6
"""Relative size below which the float32 total and the sum of its parts are the same."""


class GDPOOptions(F.PolicyLossOptions):
    std_eps: float = Field(1e-6, ge=0, description="added to each standard deviation")


class GDPO(GroupRelative):
    Options = GDPOOptions
    options: GDPOOptions

    @hookimpl
    def compute_advantages(self, experience: Experience) -> Advantages:
        """Computes ``A_i = (S_i − mean_batch S) / (std_batch S + ε)`` with ``S_i = Σ_k w_k·(r_ik − mean_g r_k) / (std_g r_k +
        ε)``, on every action token (eqs. 4, 6 and 7).

        The change made by ``transform_rewards`` is one more component of weight 1. ``Σ_t shaped_it`` enters ``S_i`` minus its
        group mean, undivided: if it were normalised, its coefficient would have no effect. The batch's statistics are over the
        episodes of groups with more than one.
        """
        groups, episodes, eps = experience.group_id, experience.episode_id, self.options.std_eps
        total = F.group_normalize(shaped_sums(experience), groups, episodes, std="none")
        for weight, values in components(experience):
            total = total + weight * F.group_normalize(values, groups, episodes, eps=eps)
        # Groups of one make a batch of their own, whose sums are all 0.
        alone = (F.group_sizes(groups, episodes) < 2).long()
        return Advantages(F.on_actions(F.group_normalize(total, alone, episodes, eps=eps), experience.action_mask))


def components(experience: Experience) -> list[tuple[float, Tensor]]:
    """Returns weight and ``[B]`` float64 values of each reward, then of the change made by the transforms.

    A reward missing from a judged row (of weight 0, or an agent's in a batch of several agents) is 0 there, as in the total.
    """
    columns = experience.plugin_rewards.double().nan_to_num().unbind(-1)
    parts = list(zip(experience.reward_weights, columns, strict=True))
    change = experience.rewards.double() - sum(weight * values for weight, values in parts)
    size = sum(abs(weight) * values.abs() for weight, values in parts)
    return [*parts, (1.0, change * (change.abs() > _ROUNDING * size))]
