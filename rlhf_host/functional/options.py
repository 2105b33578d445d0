"""Options of the policy losses, for algorithms to inherit. Imports no torch."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

AGGREGATIONS = ("token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "group-mean-token-mean")
_SUM_OVER = re.compile(r"sequence-mean-token-sum-over\((\d+(?:\.\d+)?)\)")


def sum_over_length(aggregation: str) -> float | None:
    """``L`` of ``sequence-mean-token-sum-over(L)``, ``None`` for other aggregations."""
    match = _SUM_OVER.fullmatch(aggregation)
    return float(match[1]) if match and float(match[1]) > 0 else None


class PolicyLossOptions(BaseModel):
    """How advantages become a policy loss; an algorithm's ``Options`` inherits this."""

    model_config = ConfigDict(extra="forbid")

    loss: Literal["clip", "pg"] = Field(
        "clip", description="policy loss: clip (PPO's clipped surrogate) or pg (plain policy gradient)"
    )
    clip_eps: float = Field(0.2, ge=0, lt=1, description="clip: the ratio stays above 1 - clip_eps")
    clip_eps_high: float = Field(0.28, ge=0, description="clip: the ratio stays below 1 + clip_eps_high")
    dual_clip: float | None = Field(
        3.0, gt=1, description="clip: bound on the loss of negative advantages, as a multiple; none: off"
    )
    entropy_coef: float = Field(0.0, ge=0, description="weight of the full-vocabulary entropy bonus")
    aggregation: str = Field(
        "token-mean",
        description=f"how token losses are averaged: {', '.join(AGGREGATIONS)} or sequence-mean-token-sum-over(L)",
    )

    @field_validator("aggregation")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in AGGREGATIONS and sum_over_length(value) is None:
            raise ValueError(f"aggregation is one of {', '.join(AGGREGATIONS)}, sequence-mean-token-sum-over(L) with L > 0")
        return value
