"""Options of the shared losses, for algorithms to inherit. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rlhf_host.records.needs import AlgoNeeds, Forbid, Output, RoleNeed
from rlhf_host.records.tensors import AGGREGATIONS, SEQUENCE_MEAN_TOKEN_MEAN, TOKEN_MEAN, Aggregation


def check_aggregation(value: str | None) -> str | None:
    """Returns the value. Raises ``ValueError`` if it is not an aggregation."""
    if value is not None:
        Aggregation.parse(value)
    return value


class PolicyLossOptions(BaseModel):
    """Options of the policy loss. An algorithm's ``Options`` inherits this class."""

    model_config = ConfigDict(extra="forbid")

    loss: Literal["clip", "gspo", "cispo", "sapo", "dppo_tv", "ratio", "pg", "dro"] = Field(
        "clip",
        description="policy loss: clip (PPO's clipped surrogate), gspo (ratio of the whole sequence), cispo (truncated weight on "
        "the policy gradient), sapo (soft gate), dppo_tv (0 if a probability moved too far), ratio (the surrogate without a clip), "
        "pg (plain policy gradient) or dro (that, with a quadratic penalty on how far log-probabilities moved)",
    )
    clip_eps: float = Field(0.2, ge=0, lt=1, description="clip: the ratio stays above 1 - clip_eps")
    clip_eps_high: float = Field(0.28, ge=0, description="clip: the ratio stays below 1 + clip_eps_high")
    dual_clip: float | None = Field(
        3.0, gt=1, description="clip: limit on the loss of negative advantages, as a multiple of them; none: off"
    )
    gspo_eps: float = Field(3e-4, ge=0, lt=1, description="gspo: the sequence's ratio stays above 1 - gspo_eps")
    gspo_eps_high: float = Field(4e-4, ge=0, description="gspo: the sequence's ratio stays below 1 + gspo_eps_high")
    cispo_max: float = Field(5.0, gt=0, description="cispo: largest value of the ratio as a weight; clip_eps has no effect")
    sapo_tau: float = Field(1.0, gt=0, description="sapo: temperature of the gate for positive advantages")
    sapo_tau_negative: float = Field(1.05, gt=0, description="sapo: temperature of the gate for all other advantages")
    dppo_delta: float = Field(
        0.15,
        ge=0,
        le=1,
        description="dppo_tv: a token counts 0 if its probability has moved further than this in the advantage's direction",
    )
    dppo_max: float = Field(20.0, gt=0, description="dppo_tv: largest value of the ratio as a weight")
    dro_beta: float = Field(0.05, ge=0, description="dro: weight of the penalty")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus, over the full vocabulary")
    aggregation: str | None = Field(
        None,
        description=f"how token losses are averaged: {', '.join(AGGREGATIONS)} or sequence-mean-token-sum-over(L); "
        f"default: {SEQUENCE_MEAN_TOKEN_MEAN} for gspo (which allows no other) and sapo, token-mean for the others",
    )

    _known = field_validator("aggregation")(check_aggregation)

    @model_validator(mode="after")
    def _fits_the_loss(self) -> PolicyLossOptions:
        # A sequence's ratio broadcast over tokens weighs each by 1/length only in this mean.
        if self.loss == "gspo" and self.reduction != SEQUENCE_MEAN_TOKEN_MEAN:
            needed = SEQUENCE_MEAN_TOKEN_MEAN
            raise ValueError(f"loss gspo needs aggregation {needed}, not {self.reduction}: leave aggregation out")
        return self

    @property
    def reduction(self) -> Aggregation:
        """The aggregation in effect: the configured one, else the loss's own."""
        if self.aggregation is not None:
            return Aggregation.parse(self.aggregation)
        return SEQUENCE_MEAN_TOKEN_MEAN if self.loss in ("gspo", "sapo") else TOKEN_MEAN


def policy_needs(
    options: PolicyLossOptions,
    *,
    min_group_size: int = 1,
    idle_steps: int = 0,
    roles: Iterable[RoleNeed] = (),
    outputs: Iterable[Output] = (),
    forbids: Iterable[Forbid] = (),
) -> AlgoNeeds:
    """Returns the needs of an online algorithm with a policy loss: prompts, a trainable actor, and the needs of the loss.

    Args:
        options: an entropy bonus adds the output entropy; ``gspo`` and ``pg`` forbid ``train.old_logprobs sampler``, and ``pg``
            has no ratio.
        min_group_size: episodes per task that the estimator needs.
        idle_steps: number of first steps in which the actor is not trained.
        roles: in addition to the actor.
        outputs: in addition to those of the loss.
        forbids: in addition to those of the loss.
    """
    unfit = {
        "gspo": "the sampler's rounding is as large as the clip range of a sequence's ratio",
        "pg": "this loss has no ratio, so nothing corrects for the sampler",
    }
    own = [Forbid("train.old_logprobs", "sampler", unfit[options.loss])] if options.loss in unfit else []
    return AlgoNeeds(
        data="prompts",
        roles=(RoleNeed("actor", trainable=True, source=None, idle_steps=idle_steps), *roles),
        min_group_size=min_group_size,
        ratio=options.loss != "pg",
        outputs=(*([Output("entropy")] if options.entropy_coef > 0 else []), *outputs),
        forbids=(*own, *forbids),
    )
