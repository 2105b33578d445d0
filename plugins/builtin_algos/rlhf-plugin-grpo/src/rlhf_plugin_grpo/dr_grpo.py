"""Dr. GRPO: GRPO without its two biases, the standard deviation and the length (arXiv:2503.20783)."""

from __future__ import annotations

from pydantic import Field, PositiveInt, model_validator

from rlhf_host import Advantages, Batch, Experience, LossTerm, Metric, Outputs, hookimpl
from rlhf_host import functional as F
from rlhf_plugin_grpo.group import GroupRelative, sequence_rewards


class DrGRPOOptions(F.PolicyLossOptions):
    max_length: PositiveInt | None = Field(
        None,
        description="the constant that divides the summed token losses of each sequence; none: rollout.max_new_tokens "
        "(with several turns, set it to the largest number of action tokens of a trajectory)",
    )
    aggregation: str | None = Field(
        None, description="cannot be set: Dr. GRPO always uses sequence-mean-token-sum-over(max_length)"
    )

    @model_validator(mode="after")
    def _summed_over_a_constant(self) -> DrGRPOOptions:
        if self.aggregation is not None:
            raise ValueError(
                "dr_grpo sums over the constant max_length: leave aggregation out, or take algo grpo with std none"
            )
        if self.loss == "gspo":
            raise ValueError("loss gspo needs a mean over each sequence's tokens, dr_grpo a sum: take algo grpo with std none")
        return self


class DrGRPO(GroupRelative):
    Options = DrGRPOOptions
    options: DrGRPOOptions

    @hookimpl
    def compute_advantages(self, experience: Experience) -> Advantages:
        """Computes ``A_i = R̃_i − mean_g R̃`` on every action token (section 3.2), ``R̃_i = R_i + Σ_t shaped_it``."""
        values = F.group_normalize(sequence_rewards(experience), experience.group_id, experience.episode_id, std="none")
        return Advantages(F.on_actions(values, experience.action_mask))

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> list[LossTerm | Metric]:
        """Computes the policy loss, averaged over sequences and divided by a constant instead of each one's length."""
        length = self.options.max_length or batch.max_new_tokens
        fixed = {"aggregation": f"sequence-mean-token-sum-over({length})"}
        return F.policy_loss(outputs, batch, self.options.model_copy(update=fixed))
