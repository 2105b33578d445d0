"""GRPO: rewards normalised within their group (DeepSeekMath, arXiv:2402.03300)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_host import Advantages, Experience, hookimpl
from rlhf_host import functional as F
from rlhf_plugin_grpo.group import GroupRelative, sequence_rewards


class GRPOOptions(F.PolicyLossOptions):
    std: Literal["group", "batch", "none"] = Field(
        "group",
        description="with credit trajectory: divide by the standard deviation of the group, of the batch, or not at all",
    )
    std_eps: float = Field(1e-6, ge=0, description="added to the standard deviation")
    credit: Literal["trajectory", "turn"] = Field(
        "trajectory",
        description="one advantage per trajectory, or one per turn: the sum of the rewards from this turn on, minus the "
        "group's mean of this sum; then std has no effect",
    )


class GRPO(GroupRelative):
    Options = GRPOOptions
    options: GRPOOptions

    @hookimpl
    def compute_advantages(self, experience: Experience) -> Advantages:
        """Computes ``A_i = (R̃_i − mean_g R̃) / (std + ε)`` on every action token (section 4.1.2), ``R̃_i = R_i + Σ_t
        shaped_it``.

        With ``credit: turn``, ``R̃`` is the sum over the token's turn and those after it.
        """
        mask, groups, episodes = experience.action_mask, experience.group_id, experience.episode_id
        if self.options.credit == "turn":
            rewards = experience.token_rewards
            if experience.shaped is not None:
                rewards = rewards + experience.shaped
            return Advantages(F.turn_advantages(rewards, experience.turn_ids, mask, groups, episodes))
        values = F.group_normalize(
            sequence_rewards(experience), groups, episodes, std=self.options.std, eps=self.options.std_eps
        )
        return Advantages(F.on_actions(values, mask))
