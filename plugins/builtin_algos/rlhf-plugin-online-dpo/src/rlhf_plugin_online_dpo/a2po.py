"""A*-PO: least squares on the optimal advantage, whose value is estimated from the reference's answers (arXiv:2505.20686).

Of a prompt's ``n`` answers the first is the policy's and is trained, the others are the reference's. The agent ``a2po`` samples
them so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import (
    AlgoNeeds,
    Batch,
    Drop,
    Group,
    LossTerm,
    Metric,
    Outputs,
    Trajectory,
    hookimpl,
)
from rlhf_plugin_online_dpo.rivals import RIVAL, BesideReference, check_agent, logprobs_of_rows, regression_needs


class FirstOfPolicy(BesideReference):
    """The agent of A*-PO: one question, one answer; the first answer of a prompt is the policy's, the others the reference's."""

    def is_own(self, sample: int) -> bool:
        return sample == 0


class A2POOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    beta_value: float = Field(
        0.5, gt=0, description="temperature of the estimated value, β₁ of the paper: small: the best answer, large: the mean"
    )
    beta: float = Field(1e-3, gt=0, description="weight of the KL from the reference, β₂ of the paper")
    filter_hopeless: bool = Field(
        True, description="drop prompts of which no answer of the reference has a reward above 0: their value is unknown"
    )


class A2PO:
    """A*-PO: the policy's log-ratio to the reference goes to the optimal advantage, by least squares.

    ``(β₂·log(π(y)/ref(y)) − (r(y) − V*))²``, a mean over the policy's answers, with ``V* = β₁·log mean_i exp(r(y_i)/β₁)`` of the
    reference's answers ``y_i`` (arXiv:2505.20686, algorithm 1).
    """

    Options = A2POOptions

    def __init__(self, options: A2POOptions):
        self.options = options

    @hookimpl
    def needs(self) -> AlgoNeeds:
        return regression_needs()

    @hookimpl
    def check_run(self, config: Mapping[str, Any]) -> None:
        check_agent(config, "a2po", "all answers but a prompt's first are the reference's")

    @hookimpl
    def keep_group(self, group: Group) -> bool | Drop:
        own, others = parts(group)
        if own is None or not others:
            return Drop("no_value")
        return Drop("hopeless") if self.options.filter_hopeless and max(others) <= 0 else True

    @hookimpl
    def make_rows(self, groups: Sequence[Group]) -> list[Trajectory]:
        """Returns the policy's answer of each prompt, with its reward and the prompt's value."""
        rows = []
        for group in groups:
            own, others = parts(group)
            if own is not None and own.reward is not None and others:
                columns = {"reward": own.reward, "value": optimal_value(others, self.options.beta_value)}
                rows.append(replace(own, columns={**own.columns, **columns}))
        return rows

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> list[LossTerm | Metric]:
        beta, sums = self.options.beta, logprobs_of_rows(outputs, batch)
        ratios = sums - batch.logprobs[RIVAL].where(batch.loss_mask, 0.0).sum(-1)
        advantages = batch.columns["reward"] - batch.columns["value"]
        trained = batch.loss_mask.any(-1)
        return [
            LossTerm("regression", (beta * ratios - advantages).square()),
            Metric("value", batch.columns["value"], trained),
            Metric("optimal_advantage", advantages, trained),
            Metric("kl_reference", ratios.detach(), trained),
        ]


def parts(group: Group) -> tuple[Trajectory | None, list[float]]:
    """Returns the policy's answer, None if it is unjudged, and the rewards of the reference's."""
    judged = {row.sample: row for row in group.trajectories if row.reward is not None}
    rewards = (row.reward for sample, row in sorted(judged.items()) if sample > 0)
    return judged.get(0), [reward for reward in rewards if reward is not None]


def optimal_value(rewards: Sequence[float], beta: float) -> float:
    """Returns ``β·log mean exp(r/β)``; large rewards do not overflow."""
    most = max(rewards)
    return most + beta * math.log(math.fsum(math.exp((reward - most) / beta) for reward in rewards) / len(rewards))
