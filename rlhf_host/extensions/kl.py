"""The KL penalty towards the reference policy, in the reward or in the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationInfo, field_validator

from rlhf_host import functional as F
from rlhf_host.errors import UserError
from rlhf_host.functional.options import AGGREGATIONS, check_aggregation
from rlhf_host.hookspecs import hookimpl
from rlhf_host.records.needs import DataFormat, Needs, Output, RoleNeed
from rlhf_host.records.tensors import Aggregation, Batch, Experience, LossTerm, Metric, Outputs

if TYPE_CHECKING:
    from torch import Tensor


class KL:
    """The KL penalty towards the reference policy, in the reward or in the loss.

    The coefficient is fixed, or follows ``β ← β·(1 + clip(KL/target − 1, ±0.2)·n/horizon)``
    (Ziegler et al., arXiv:1909.08593, section 2.2), KL being the mean over trajectories of the mean per-token k1."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        coef: float = Field(ge=0, description="coefficient of the penalty; 0: off, and no reference model is loaded")
        place: Literal["reward", "loss"] = Field(
            "reward", description="where the penalty is applied: in the reward of each token, or as a loss term"
        )
        force: bool = Field(False, description="allow a biased estimator in the reward")
        estimator: Literal["auto", "k1", "k2", "k3", "unbiased"] = Field(
            "auto", description="auto: k1 in the reward, unbiased in the loss"
        )
        aggregation: str = Field(
            "token-mean", description=f"of the loss term: {', '.join(AGGREGATIONS)} or sequence-mean-token-sum-over(L)"
        )
        controller: Literal["fixed", "adaptive"] = Field(
            "fixed", description="adaptive: the coefficient changes to reach the target"
        )
        target: float = Field(0.01, gt=0, description="adaptive: the KL to reach, in nats per token")
        horizon: PositiveInt = Field(10000, description="adaptive: trajectories over which the coefficient may double")

        _known = field_validator("aggregation")(check_aggregation)

        @field_validator("estimator")
        @classmethod
        def _sound(cls, value: str, others: ValidationInfo) -> str:
            place = others.data.get("place") if others.data.get("coef") else None
            if place == "loss" and value == "k1":
                raise ValueError("k1 has zero expected gradient in the loss: set it to unbiased, or place to reward")
            if place == "reward" and value not in ("auto", "k1") and not others.data.get("force"):
                raise ValueError(f"{value} is biased in the reward: set it to k1, or set force to true to allow it")
            return value

        @property
        def decided_estimator(self) -> str:
            """``estimator``, with ``auto`` replaced by the choice."""
            return self.estimator if self.estimator != "auto" else "k1" if self.place == "reward" else "unbiased"

    def __init__(self, options: Options):
        self.options = options
        self.coef = options.coef
        self._trajectories = 0

    @hookimpl
    def needs(self) -> Needs:
        if self.options.coef == 0:
            return Needs()
        # In the reward the penalty is part of the advantages, so the actor's log-probabilities are needed before them.
        roles = ("reference", "actor") if self.options.place == "reward" else ("reference",)
        outputs = tuple(Output("logprobs", role=role) for role in roles)
        data: DataFormat | None = "prompts" if self.options.place == "reward" else None  # rows of data have no reward to add to
        return Needs(data=data, roles=(RoleNeed("reference", source="actor"),), outputs=outputs)

    @hookimpl
    def shape_rewards(self, experience: Experience) -> Tensor | None:
        if self.options.coef == 0 or self.options.place != "reward":
            return None
        actor, reference = experience.logprobs["actor"], experience.logprobs["reference"]
        return -self.coef * F.kl_estimate(actor, reference, experience.action_mask, self.options.decided_estimator)

    @hookimpl
    def prepare_batch(self, experience: Experience) -> dict[str, float]:
        self._trajectories = len(experience)
        return {"coef": self.coef}

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> Iterator[LossTerm | Metric]:
        if outputs.logprobs is None or self.options.coef == 0:
            return
        reference, mask = batch.logprobs["reference"], batch.loss_mask
        logprobs, actions, coef = outputs.logprobs.detach(), batch.action_mask, batch.own["coef"]
        # Of the policy that sampled, which the coefficient follows: updates of the same batch move the other one.
        per_token = F.kl_estimate(logprobs if batch.old_logprobs is None else batch.old_logprobs, reference, actions, "k1")
        yield Metric("kl", F.masked_mean(per_token, actions, -1), actions.any(-1))
        yield Metric("kl/k3", F.kl_estimate(logprobs, reference, actions, "k3"), actions)
        yield Metric("kl/coef", coef)
        if self.options.place == "loss":
            values = F.kl_loss(outputs.logprobs, reference, mask, self.options.decided_estimator, batch.sampler_logprobs)
            yield LossTerm("kl", values, coefficient=coef, aggregation=Aggregation.parse(self.options.aggregation))

    @hookimpl
    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        kl = metrics.get("kl")
        if self.options.controller == "adaptive" and kl is not None and math.isfinite(kl):
            error = min(max(kl / self.options.target - 1.0, -0.2), 0.2)
            self.coef *= 1.0 + error * self._trajectories / self.options.horizon

    @hookimpl
    def adjust(self, settings: Mapping[str, float]) -> None:
        for name, value in settings.items():
            if name != "coef" or value < 0:
                raise UserError(f"{name} {value:g}: only coef can be adjusted, to 0 or more")
            self.coef = value

    @hookimpl
    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef, "trajectories": self._trajectories}

    @hookimpl
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.coef = float(state["coef"])
        self._trajectories = int(state["trajectories"])
