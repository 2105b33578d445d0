"""Options of the policy losses, for algorithms to inherit. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rlhf_host.records.needs import Forbid, Needs, Output, RoleNeed
from rlhf_host.records.tensors import AGGREGATIONS, SEQUENCE_MEAN_TOKEN_MEAN, TOKEN_MEAN, Aggregation


def check_aggregation(value: str) -> str:
    """The value. Raises ``ValueError`` when it is no aggregation."""
    Aggregation.parse(value)
    return value


class PolicyLossOptions(BaseModel):
    """How advantages become a policy loss; an algorithm's ``Options`` inherits this."""

    model_config = ConfigDict(extra="forbid")

    loss: Literal["clip", "gspo", "cispo", "sapo", "dppo_tv", "pg"] = Field(
        "clip",
        description="policy loss: clip (PPO's clipped surrogate), gspo (ratio of the whole sequence), cispo (truncated weight on "
        "the policy gradient), sapo (soft gate), dppo_tv (kept while probabilities are near) or pg (plain policy gradient)",
    )
    clip_eps: float = Field(0.2, ge=0, lt=1, description="clip: the ratio stays above 1 - clip_eps")
    clip_eps_high: float = Field(0.28, ge=0, description="clip: the ratio stays below 1 + clip_eps_high")
    dual_clip: float | None = Field(
        3.0, gt=1, description="clip: bound on the loss of negative advantages, as a multiple; none: off"
    )
    gspo_eps: float = Field(3e-4, ge=0, lt=1, description="gspo: the sequence's ratio stays above 1 - gspo_eps")
    gspo_eps_high: float = Field(4e-4, ge=0, description="gspo: the sequence's ratio stays below 1 + gspo_eps_high")
    cispo_max: float = Field(5.0, gt=0, description="cispo: upper bound of the ratio as a weight; the clip bounds play no part")
    sapo_tau: float = Field(1.0, gt=0, description="sapo: temperature of the gate where the advantage is positive")
    sapo_tau_negative: float = Field(1.05, gt=0, description="sapo: temperature of the gate elsewhere")
    dppo_delta: float = Field(
        0.15, ge=0, le=1, description="dppo_tv: how far a token's probability may move the advantage's way before it counts 0"
    )
    dppo_max: float = Field(20.0, gt=0, description="dppo_tv: upper bound of the ratio as a weight")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the full-vocabulary entropy bonus")
    aggregation: str | None = Field(
        None,
        description=f"how token losses are averaged: {', '.join(AGGREGATIONS)} or sequence-mean-token-sum-over(L); "
        f"default: {SEQUENCE_MEAN_TOKEN_MEAN} for gspo (which takes no other) and sapo, token-mean for the rest",
    )

    @field_validator("aggregation")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        return None if value is None else check_aggregation(value)

    @model_validator(mode="after")
    def _fits_the_loss(self) -> PolicyLossOptions:
        # A sequence's ratio broadcast over tokens weighs each by 1/length only in this mean.
        if self.loss == "gspo" and self.reduction != SEQUENCE_MEAN_TOKEN_MEAN:
            needed = SEQUENCE_MEAN_TOKEN_MEAN
            raise ValueError(f"loss gspo needs aggregation {needed}, not {self.reduction}: leave aggregation out")
        return self

    @property
    def reduction(self) -> Aggregation:
        """The aggregation in effect: the one given, else the loss's own."""
        if self.aggregation is not None:
            return Aggregation.parse(self.aggregation)
        return SEQUENCE_MEAN_TOKEN_MEAN if self.loss in ("gspo", "sapo") else TOKEN_MEAN


def policy_needs(
    options: PolicyLossOptions,
    *,
    min_group_size: int = 1,
    roles: Iterable[RoleNeed] = (),
    outputs: Iterable[Output] = (),
    forbids: Iterable[Forbid] = (),
) -> Needs:
    """What an online algorithm with one of the policy losses needs: prompts, a trainable actor, and the loss's own wants.

    Args:
        options: entropy is an output where its bonus is on; ``gspo`` forbids ``train.old_logprobs sampler``.
        min_group_size: episodes per task that the estimator needs.
        roles: beyond the actor.
        outputs: beyond the loss's own.
        forbids: beyond the loss's own.
    """
    noise = "the sampler's rounding is as large as the clip range of a sequence's ratio"
    return Needs(
        data="prompts",
        roles=(RoleNeed("actor", trainable=True, source=None), *roles),
        min_group_size=min_group_size,
        outputs=(*([Output("entropy")] if options.entropy_coef > 0 else []), *outputs),
        forbids=(*([Forbid("train.old_logprobs", "sampler", noise)] if options.loss == "gspo" else []), *forbids),
    )
