"""Policy terms of the algorithms' losses, in masked tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_host import Batch, Outputs

MAX_LOG = 20.0
"""Largest difference of log-probabilities that counts, as in the host's policy losses."""


class Terms(NamedTuple):
    """Tensors ``[B, T]``, 0 outside the mask."""

    logprobs: Tensor
    gap: Tensor
    """``log π − log π_old``, with gradient, within ±20; without old log-probabilities those of the pass stand for them."""
    advantages: Tensor
    mask: Tensor


def terms(outputs: Outputs, batch: Batch) -> Terms:
    """Returns what the losses are made of; masked places may have had any values."""
    if outputs.logprobs is None or batch.advantages is None:
        raise ValueError("a policy loss needs outputs.logprobs and batch.advantages")
    mask = batch.loss_mask
    logprobs = torch.where(mask, outputs.logprobs, 0.0)
    old = logprobs.detach() if batch.old_logprobs is None else torch.where(mask, batch.old_logprobs, 0.0)
    gap = (logprobs - old).clamp(-MAX_LOG, MAX_LOG)
    return Terms(logprobs, gap, torch.where(mask, batch.advantages, 0.0), mask)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Returns ``[B]``: the mean over each row's tokens in the mask, 0 for rows without any."""
    return torch.where(mask, values, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)


def geometric_mean_loss(of: Terms, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Returns ``[B]`` and a mask ``[B, T]`` of clipped tokens: ``−A·exp(mean_t clip(log ρ_t))``, each token clipped to ``[−low,
    high]`` on the side that would raise the objective (arXiv:2507.20673, eqs. 4 and 7).
    """
    sign = of.advantages.sign()
    clipped = of.gap.clamp(-low, high)
    kept = sign * torch.minimum(sign * of.gap, sign * clipped)
    ratio = row_mean(kept, of.mask).exp()
    return -row_mean(of.advantages, of.mask) * ratio, (kept != of.gap) & of.mask


def gamma_weight(of: Terms, k: tuple[float, float], lam: tuple[float, float]) -> Tensor:
    """Returns ``[B, T]`` without gradient: ``φ(w) = e^λ·w^k·e^{−λw}``, which is 1 at ``w = 1``, with ``w = Π_t ρ_t`` of the row
    within ``[1e-8, e^20]``; ``k`` and ``λ`` by the sign of the advantage, the first for 0 and above (arXiv:2602.10693).
    """
    log_w = of.gap.detach().sum(-1, keepdim=True).clamp(torch.tensor(1e-8).log().item(), MAX_LOG)
    good = of.advantages >= 0
    power, decay = (torch.where(good, one[0], one[1]) for one in (k, lam))
    return (decay + power * log_w - decay * log_w.exp()).exp()
