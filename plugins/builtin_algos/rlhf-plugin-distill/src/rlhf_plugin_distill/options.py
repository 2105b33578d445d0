"""Options of both algorithms. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rlhf_host import functional as F


class DivergenceOptions(BaseModel):
    """Options for the divergence."""

    model_config = ConfigDict(extra="forbid")

    beta: float = Field(
        0.0, ge=0, le=1, description="0: KL(teacher, student); 1: KL(student, teacher); between: generalised Jensen-Shannon"
    )
    top_k: int = Field(0, ge=0, description="the teacher's likeliest tokens are compared; 0: the whole vocabulary")
    tail: Literal["bucket", "renormalise"] = Field(
        "bucket", description="top_k: all other tokens count as one, or are left out and the rest is renormalised"
    )

    @model_validator(mode="after")
    def _has_a_tail(self) -> DivergenceOptions:
        if self.tail == "renormalise" and not self.top_k:
            raise ValueError("tail renormalise is for the tokens beyond top_k, and top_k is 0: set top_k, or leave tail out")
        return self


class Options(DivergenceOptions):
    alpha: float = Field(1.0, gt=0, le=1, description="weight of the divergence; the rest is that of the data's own tokens")
    temperature: float = Field(1.0, gt=0, description="of both distributions in the divergence")

    @model_validator(mode="after")
    def _knows_the_temperature(self) -> Options:
        if self.temperature != 1 and self.top_k and self.tail == "bucket":
            raise ValueError(
                "the probability of the tokens beyond top_k is known at temperature 1 only: set tail to renormalise, top_k to 0,"
                " or leave temperature out"
            )
        return self


class OnPolicyOptions(DivergenceOptions, F.PolicyLossOptions):
    signal: Literal["sample", "full"] = Field(
        "sample", description="sample: the sampled token's log-probabilities, as an advantage; full: the divergence"
    )
    beta: float = Field(
        1.0,
        ge=0,
        le=1,
        description="full: 0: KL(teacher, student); 1: KL(student, teacher); between: generalised Jensen-Shannon",
    )

    @model_validator(mode="after")
    def _fits_the_signal(self) -> OnPolicyOptions:
        divergence = {"beta": self.beta != 1, "top_k": self.top_k > 0}
        if self.signal == "sample" and (idle := [name for name, changed in divergence.items() if changed]):
            raise ValueError(f"signal sample compares sampled tokens and has no {idle[0]}: leave it out, or set signal to full")
        policy = {
            "loss": self.loss != "clip",
            "entropy_coef": self.entropy_coef > 0,
            "aggregation": self.aggregation is not None,
        }
        if self.signal == "full" and (idle := [name for name, changed in policy.items() if changed]):
            raise ValueError(f"signal full has no policy loss and so no {idle[0]}: leave it out, or set signal to sample")
        return self
