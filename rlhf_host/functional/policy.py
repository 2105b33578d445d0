"""Policy losses per token, unreduced: any advantage estimator combines with any of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_host.functional.options import PolicyLossOptions
from rlhf_host.types import Experience, LossTerm, Metric, Outputs

_MAX_LOG = 20.0

PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor, PolicyLossOptions], tuple[Tensor, list[Metric]]]
"""``(logprobs, old_logprobs, advantages, mask, options)`` → per-token loss ``[B, T]`` and metrics."""


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """``ρ = exp(clip(log π − log π_old, ±20))``, 1 outside ``mask``; ``[B, T]``."""
    return torch.where(mask, logprobs - old_logprobs, 0.0).clamp(-_MAX_LOG, _MAX_LOG).exp()


def _clip(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, options: PolicyLossOptions
) -> tuple[Tensor, list[Metric]]:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7) with separate bounds (DAPO, arXiv:2503.14476) and dual clip
    (arXiv:1912.09729, eq. 5)."""
    ratio = importance_ratio(logprobs, old_logprobs, mask)
    clipped = ratio.clamp(1 - options.clip_eps, 1 + options.clip_eps_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    active = (clipped * advantages < ratio * advantages) & mask
    if options.dual_clip is not None:
        floor = options.dual_clip * advantages
        negative = (advantages < 0) & mask
        active = active | (negative & (surrogate < floor))
        surrogate = torch.where(negative, torch.maximum(surrogate, floor), surrogate)
    return -surrogate, [Metric("clip_fraction", active.float(), mask)]


def _pg(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, options: PolicyLossOptions
) -> tuple[Tensor, list[Metric]]:
    """The plain policy gradient, ``−A·log π`` (REINFORCE, Williams 1992)."""
    return -advantages * logprobs, []


policy_losses: dict[str, PolicyLoss] = {"clip": _clip, "pg": _pg}


def policy_loss(outputs: Outputs, batch: Experience, options: PolicyLossOptions) -> list[LossTerm | Metric]:
    """The policy term (and the entropy bonus, where asked for) of one micro-batch.

    ``old_logprobs`` of ``None`` (``fused``) means the detached π of this forward. Masked positions may hold anything.
    """
    if outputs.logprobs is None or batch.advantages is None:
        raise ValueError("a policy loss needs outputs.logprobs and batch.advantages")
    mask = batch.loss_mask
    logprobs = torch.where(mask, outputs.logprobs, 0.0)
    old = logprobs.detach() if batch.old_logprobs is None else torch.where(mask, batch.old_logprobs, 0.0)
    advantages = torch.where(mask, batch.advantages, 0.0)
    values, metrics = policy_losses[options.loss](logprobs, old, advantages, mask, options)
    items: list[LossTerm | Metric] = [
        LossTerm("policy", values, aggregation=options.aggregation, corrected=True),
        *metrics,
    ]
    if options.entropy_coef > 0:
        if outputs.entropy is None:
            raise ValueError("entropy_coef > 0 needs 'entropy' among needs().outputs")
        bonus = -torch.where(mask, outputs.entropy, 0.0)
        items.append(LossTerm("entropy", bonus, coefficient=options.entropy_coef, aggregation=options.aggregation))
    return items
