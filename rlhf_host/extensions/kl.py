"""The KL penalty: towards the reference policy, in the reward or in the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlhf_host import functional as F
from rlhf_host.config.schema import KLConfig
from rlhf_host.hookspecs import hookimpl
from rlhf_host.records.needs import Needs, RoleNeed
from rlhf_host.records.tensors import Experience, LossTerm, Metric, Outputs

if TYPE_CHECKING:
    from torch import Tensor


class KL:
    """Configured at ``kl:``. The coefficient is fixed, or follows ``β ← β·(1 + clip(KL/target − 1, ±0.2)·n/horizon)``
    (Ziegler et al., arXiv:1909.08593, section 2.2), KL being the mean over trajectories of the mean per-token k1."""

    Options = KLConfig

    def __init__(self, options: KLConfig):
        self.options = options
        self.coef = options.coef
        self._trajectories = 0

    @hookimpl
    def needs(self) -> Needs:
        # In the reward the penalty is part of the advantages, so the actor's log-probabilities are needed before them.
        outputs = {"reference.logprobs"} | ({"actor.logprobs"} if self.options.place == "reward" else set())
        return Needs(roles=(RoleNeed("reference", source="actor"),), outputs=frozenset(outputs))

    @hookimpl
    def shape_rewards(self, experience: Experience) -> Tensor | None:
        self._trajectories = len(experience)
        experience.extra["kl"] = {"coef": self.coef}
        if self.options.place != "reward":
            return None
        estimator = "k1" if self.options.estimator == "auto" else self.options.estimator
        return -self.coef * F.kl_estimate(
            experience.logprobs["actor"], experience.logprobs["reference"], experience.action_mask, estimator
        )

    @hookimpl
    def compute_loss(self, role: str, outputs: Outputs, batch: Experience) -> Iterator[LossTerm | Metric]:
        if role != "actor" or outputs.logprobs is None:
            return
        reference = batch.logprobs["reference"]
        mask = batch.loss_mask
        logprobs, actions = outputs.logprobs.detach(), batch.action_mask
        per_token = F.kl_estimate(logprobs, reference, actions, "k1")
        yield Metric("kl", F.masked_mean(per_token, actions, -1), actions.any(-1))
        yield Metric("kl/k3", F.kl_estimate(logprobs, reference, actions, "k3"), actions)
        yield Metric("kl/coef", batch.extra["kl"]["coef"])
        if self.options.place == "loss":
            estimator = "unbiased" if self.options.estimator == "auto" else self.options.estimator
            values = F.kl_loss(outputs.logprobs, reference, mask, estimator, batch.sampler_logprobs)
            coef, aggregation = batch.extra["kl"]["coef"], self.options.aggregation
            yield LossTerm("kl", values, coefficient=coef, aggregation=aggregation)

    @hookimpl
    def step_finished(self, metrics: Mapping[str, float]) -> None:
        kl = metrics.get("kl")
        if self.options.controller == "adaptive" and kl is not None and math.isfinite(kl):
            error = min(max(kl / self.options.target - 1.0, -0.2), 0.2)
            self.coef *= 1.0 + error * self._trajectories / self.options.horizon

    @hookimpl
    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef, "trajectories": self._trajectories}

    @hookimpl
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.coef = float(state["coef"])
        self._trajectories = int(state["trajectories"])
