"""Policy losses per token, unreduced: any advantage estimator combines with any of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_host.functional.options import PolicyLossOptions
from rlhf_host.records.tensors import Batch, LossTerm, Metric, Outputs

MAX_LOG = 20.0

Loss = tuple[Tensor, list[Metric]]
"""Per-token loss ``[B, T]``, and metrics."""
PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor, PolicyLossOptions], Loss]
"""``(logprobs, old_logprobs, advantages, mask, options)`` → the loss."""


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Returns ``ρ = exp(clip(log π − log π_old, ±20))``, 1 outside ``mask``; ``[B, T]``."""
    return torch.where(mask, logprobs - old_logprobs, 0.0).clamp(-MAX_LOG, MAX_LOG).exp()


def _clip(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, options: PolicyLossOptions) -> Loss:
    """PPO's clipped surrogate, ``−min(ρA, clip(ρ, 1−ε_lo, 1+ε_hi)·A)`` (arXiv:1707.06347, eq. 7), with separate bounds
    (DAPO, arXiv:2503.14476, eq. 10) and, for ``A < 0``, dual clip ``−max(min(…), cA)`` (arXiv:1912.09729, eq. 5)."""
    ratio = importance_ratio(logprobs, old_logprobs, mask)
    surrogate, active = _clipped_surrogate(ratio, advantages, 1 - options.clip_eps, 1 + options.clip_eps_high)
    metrics: list[Metric] = []
    if options.dual_clip is not None:
        floor = options.dual_clip * advantages
        below = (advantages < 0) & (surrogate < floor)
        surrogate = torch.where(below, floor, surrogate)
        active = active | below
        metrics.append(Metric("dual_clip_fraction", below.float(), mask))
    return -surrogate, [Metric("clip_fraction", active.float(), mask), *metrics]


def _gspo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, options: PolicyLossOptions) -> Loss:
    """GSPO-token: ``−min(s_it·A, clip(s_it, 1−ε_lo, 1+ε_hi)·A)`` with ``s_i = exp(mean_t(log π − log π_old))`` over the
    mask's tokens of the row and ``s_it = sg(s_i)·exp(log π − sg(log π))`` (arXiv:2507.18071, eqs. 7, 13 and 14)."""
    gap = torch.where(mask, logprobs.detach() - old_logprobs, 0.0)
    mean = gap.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = mean.clamp(-MAX_LOG, MAX_LOG).exp() * (logprobs - logprobs.detach()).exp()
    surrogate, active = _clipped_surrogate(ratio, advantages, 1 - options.gspo_eps, 1 + options.gspo_eps_high)
    return -surrogate, [Metric("clip_fraction", active.float(), mask)]


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Returns ``min(ρA, clip(ρ, low, high)·A)`` and a mask of the tokens where the clipped term is the smaller one."""
    plain, clipped = ratio * advantages, ratio.clamp(low, high) * advantages
    active = clipped < plain
    return torch.where(active, clipped, plain), active


def _cispo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, options: PolicyLossOptions) -> Loss:
    """CISPO: ``−sg(min(ρ, ρ_max))·A·log π``; no token loses its gradient (MiniMax-M1, arXiv:2506.13585, eqs. 4 and 5; the
    bound and its default as in ScaleRL, arXiv:2510.13786)."""
    ratio = importance_ratio(logprobs.detach(), old_logprobs, mask)
    values = -ratio.clamp(max=options.cispo_max) * advantages * logprobs
    return values, [Metric("clip_fraction", (ratio > options.cispo_max).float(), mask)]


def _sapo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, options: PolicyLossOptions) -> Loss:
    """SAPO: ``−(4/τ)·σ(τ(ρ−1))·A``, ``τ`` by the advantage's sign (arXiv:2511.20347, section 3).

    The metric ``gate`` is ``4σ(1−σ)`` in ``(0, 1]``: what the gate leaves of the token's gradient.
    """
    ratio = importance_ratio(logprobs, old_logprobs, mask)
    tau = torch.full_like(ratio, options.sapo_tau_negative).masked_fill(advantages > 0, options.sapo_tau)
    gate = torch.sigmoid(tau * (ratio - 1))
    return -4 / tau * gate * advantages, [Metric("gate", 4 * (gate * (1 - gate)).detach(), mask)]


def _dppo_tv(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, options: PolicyLossOptions) -> Loss:
    """DPPO with the binary total variation: ``−sg(min(ρ, C))·A·log π``, kept where ``π − π_old ≤ δ`` for ``A > 0`` and where
    ``π − π_old ≥ −δ`` otherwise (arXiv:2602.04879; ``C`` in section 5.4)."""
    current = logprobs.detach()
    ratio = importance_ratio(current, old_logprobs, mask)
    moved = current.clamp(max=0.0).exp() - old_logprobs.clamp(max=0.0).exp()
    near = torch.where(advantages > 0, moved <= options.dppo_delta, moved >= -options.dppo_delta)
    values = -ratio.clamp(max=options.dppo_max) * advantages * logprobs
    return torch.where(near, values, 0.0), [Metric("clip_fraction", (~near).float(), mask)]


def _ratio(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, options: PolicyLossOptions) -> Loss:
    """The surrogate without a clip, ``−ρA``, for corrections that leave tokens out in its place (M2PO, arXiv:2510.01161)."""
    return -importance_ratio(logprobs, old_logprobs, mask) * advantages, []


def _pg(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, options: PolicyLossOptions) -> Loss:
    """The plain policy gradient, ``−A·log π`` (REINFORCE, Williams 1992)."""
    return -advantages * logprobs, []


def _dro(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, options: PolicyLossOptions) -> Loss:
    """``−(A·log π − β/2·(log π − log π_old)²)``: the policy gradient with a quadratic penalty in place of a clip, of the form of
    DRO (arXiv:2405.19107) and of Kimi k1.5 (arXiv:2501.12599, section 2.3.2), per token."""
    return 0.5 * options.dro_beta * (logprobs - old_logprobs).square() - logprobs * advantages, []


_LOSSES: tuple[PolicyLoss, ...] = (_clip, _gspo, _cispo, _sapo, _dppo_tv, _ratio, _pg, _dro)
policy_losses = {loss.__name__.removeprefix("_"): loss for loss in _LOSSES}  # type: ignore[attr-defined]


def policy_loss(outputs: Outputs, batch: Batch, options: PolicyLossOptions) -> list[LossTerm | Metric]:
    """Returns the policy term of one micro-batch, and the entropy bonus if it is on.

    ``old_logprobs`` of ``None`` (``fused``) means the detached π of this forward. Masked positions may have any values.
    """
    if outputs.logprobs is None or batch.advantages is None:
        raise ValueError("a policy loss needs outputs.logprobs and batch.advantages")
    mask = batch.loss_mask
    logprobs = torch.where(mask, outputs.logprobs, 0.0)
    old = logprobs.detach() if batch.old_logprobs is None else torch.where(mask, batch.old_logprobs, 0.0)
    advantages = torch.where(mask, batch.advantages, 0.0)
    values, metrics = policy_losses[options.loss](logprobs, old, advantages, mask, options)
    items: list[LossTerm | Metric] = [LossTerm("policy", values, aggregation=options.reduction, corrected=True), *metrics]
    if options.entropy_coef > 0:
        if outputs.entropy is None:
            raise ValueError("entropy_coef > 0 needs Output('entropy') among needs().outputs")
        bonus = -torch.where(mask, outputs.entropy, 0.0)
        items.append(LossTerm("entropy", bonus, coefficient=options.entropy_coef, aggregation=options.reduction))
    return items
