"""Weights and gates for tokens that the sampler drew from another distribution than the trainer's.

``log w = log π_old − log μ`` per action token whose sampler μ is known; no statistic has others. Weights are 1 outside the mask.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, Field, model_validator

from rlhf_host import Batch, CorrectionNeeds, Forbid, LossTerm, Metric, Needs, Outputs, PolicyLogprobs, hookimpl
from rlhf_host import functional as F

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG = 20.0
BOUNDS = {"sum": (0.0, 2.0), "geometric": (0.999, 1.001), "k3": (0.0, 0.01)}
"""``sequence_mask``'s statistic → its default bounds."""
AGAIN = Forbid(
    "train.old_logprobs", "sampler", "the ratio is against the sampler there, and weights that are never 0 do nothing"
)


class _Interval(BaseModel, extra="forbid"):
    @model_validator(mode="after")
    def _ordered(self) -> _Interval:
        low, high = self.bounds
        if low > high:
            raise ValueError(f"low {low:g} is above the upper bound {high:g}")
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        raise NotImplementedError


class _Bounding:
    """A correction that cuts weights off: ``bounded`` returns the weights and where they were cut."""

    def __init__(self, options):
        self.options = options

    def bounded(self, logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    @hookimpl
    def importance_weights(self, logprobs: PolicyLogprobs, batch: Batch) -> Tensor:
        return self.bounded(logprobs.old, logprobs.sampler, batch.sampled_mask)[0].masked_fill(~batch.action_mask, 1.0)

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> list[LossTerm | Metric]:
        """Returns no loss, only the fraction of tokens whose weight was cut."""
        if outputs.logprobs is None:
            return []
        trainer = outputs.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        cut = self.bounded(trainer, batch.sampler_logprobs, batch.sampled_mask)[1]
        return [Metric("correction/truncated", cut.float(), batch.loss_mask)]


class TIS(_Bounding):
    """Truncated importance sampling, ``min(w, C)`` per token (Yao et al., "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training", 2025), or ``w`` clipped to ``[low, high]``."""

    class Options(_Interval):
        cap: float = Field(2.0, gt=0, description="largest weight")
        low: float = Field(0.0, ge=0, description="smallest weight")
        high: float | None = Field(None, gt=0, description="largest weight, instead of cap; default: cap")

        @property
        def bounds(self) -> tuple[float, float]:
            return self.low, self.cap if self.high is None else self.high

    @hookimpl
    def needs(self) -> Needs:
        return Needs(forbids=(AGAIN,))

    def bounded(self, logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        ratio = F.importance_ratio(logprobs, sampler_logprobs, mask)
        low, high = self.options.bounds
        return ratio.clamp(low, high).where(mask, 1.0), ((ratio < low) | (ratio > high)) & mask


class IcePop:
    """IcePop: ``w`` where ``low ≤ w ≤ high``, else 0, per token (Ling team, "Small Leak Can Sink a Great Ship: Boost RL
    Training on MoE with IcePop!", 2025; arXiv:2510.18855)."""

    class Options(_Interval):
        low: float = Field(0.5, ge=0, description="tokens with a smaller weight get 0")
        high: float = Field(5.0, gt=0, description="tokens with a larger weight get 0")

        @property
        def bounds(self) -> tuple[float, float]:
            return self.low, self.high

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    def importance_weights(self, logprobs: PolicyLogprobs, batch: Batch) -> Tensor:
        ratio = F.importance_ratio(logprobs.old, logprobs.sampler, batch.sampled_mask)
        within = (ratio >= self.options.low) & (ratio <= self.options.high)
        return (ratio * within).masked_fill(~batch.sampled_mask, 1.0)


class SequenceTruncate(_Bounding):
    """Truncates whole sequences: ``min(exp(Σ_t log w), C)`` on every token (Liu et al., "When Speed Kills Stability:
    Demystifying RL Collapse from the Training-Inference Mismatch", 2025, there Seq-TIS)."""

    class Options(BaseModel, extra="forbid"):
        cap: float = Field(2.0, gt=0, description="largest weight of a sequence")

    @hookimpl
    def needs(self) -> Needs:
        return CorrectionNeeds(forbids=(AGAIN,), weights="row")

    def bounded(self, logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        ratio = _exp(_log_ratio(logprobs, sampler_logprobs, mask)).expand(mask.shape)
        return ratio.clamp(max=self.options.cap), ratio > self.options.cap

    @hookimpl
    def importance_weights(self, logprobs: PolicyLogprobs, batch: Batch) -> Tensor:
        """Returns ``[B]`` weights of whole rows, so that losses per row can use them too."""
        return _exp(_log_ratio(logprobs.old, logprobs.sampler, batch.sampled_mask)).squeeze(-1).clamp(max=self.options.cap)


class SequenceMask(_Bounding):
    """Masks sequences whose statistic is outside ``[low, high]``: they get 0. ``sum``: ``exp(Σ_t log w)`` (Seq-MIS of Liu et
    al., 2025); ``geometric``: ``exp(mean_t log w)``, which is a gate and never a weight; ``k3``: ``mean_t(w − 1 − log w)``."""

    class Options(_Interval):
        statistic: Literal["sum", "geometric", "k3"] = Field(
            "sum", description="the statistic: the sequence's ratio, its geometric mean per token, or the mean k3 divergence"
        )
        low: float | None = Field(None, ge=0, description="smallest statistic kept; default 0 (sum, k3), 0.999 (geometric)")
        high: float | None = Field(
            None, gt=0, description="largest statistic kept; default 2 (sum), 1.001 (geometric), 0.01 (k3)"
        )
        token_weight: Literal["sequence", "token_truncated", "one"] = Field(
            "sequence", description="weight of kept tokens: the sequence's ratio, min(w, cap), or 1"
        )
        cap: float = Field(
            2.0, gt=0, description="largest weight with token_truncated, and with sequence unless the statistic limits it (sum)"
        )

        @property
        def bounds(self) -> tuple[float, float]:
            low, high = BOUNDS[self.statistic]
            return low if self.low is None else self.low, high if self.high is None else self.high

    def bounded(self, logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        options = self.options
        total = _log_ratio(logprobs, sampler_logprobs, mask)
        if options.statistic == "k3":
            value = F.masked_mean(F.kl_estimate(sampler_logprobs, logprobs, mask, "k3"), mask, -1).unsqueeze(-1)
            low, high = options.bounds
        else:  # compared as logarithms, which cannot overflow
            value = total / mask.sum(-1, keepdim=True).clamp(min=1) if options.statistic == "geometric" else total
            low, high = (math.log(bound) if bound > 0 else -math.inf for bound in options.bounds)
        kept = ((value >= low) & (value <= high) | ~mask.any(-1, keepdim=True)).expand(mask.shape)
        ratio = F.importance_ratio(logprobs, sampler_logprobs, mask)
        if options.token_weight == "sequence":
            ratio = _exp(total).expand(mask.shape)
        elif options.token_weight == "one":
            return kept.to(ratio.dtype), mask.new_zeros(mask.shape)
        cap = math.inf if options.token_weight == "sequence" and options.statistic == "sum" else options.cap
        return ratio.clamp(max=cap) * kept, kept & (ratio > cap)


class OffPolicyMask:
    """Masks bad samples far off policy: 0 where ``A < 0`` and ``mean_t(log μ − log π) > δ``, π being the current policy; else 1
    (DeepSeek-V3.2, arXiv:2512.02556, section 3.1, off-policy sequence masking)."""

    class Options(BaseModel, extra="forbid"):
        delta: float = Field(
            0.1, ge=0, description="largest difference from the sampler where the advantage is negative, in nats per token"
        )

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    def importance_weights(self, logprobs: PolicyLogprobs, batch: Batch) -> Tensor:
        drift = F.masked_mean(logprobs.sampler - logprobs.current, batch.sampled_mask, -1).unsqueeze(-1)
        out = (batch.advantages < 0) & (drift > self.options.delta) & batch.action_mask
        return (~out).to(drift.dtype)


def _log_ratio(logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
    """``[B, 1]``: ``Σ_t log w``."""
    return F.masked_sum(logprobs - sampler_logprobs, mask, -1).unsqueeze(-1)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG, MAX_LOG).exp()
