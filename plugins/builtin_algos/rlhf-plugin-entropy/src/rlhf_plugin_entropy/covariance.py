"""Covariance of advantages and log-probabilities, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_host import Experience, UserError


def covariance(experience: Experience) -> Tensor:
    """Returns ``[B, T]`` float64: ``(A − mean A)·(log π − mean log π)``, means over the tokens in the loss of the whole batch; 0 at
    other tokens (arXiv:2505.22617, eq. 10).
    """
    mask, advantages = experience.loss_mask, experience.advantages
    if advantages is None:
        raise UserError("clip_cov and kl_cov need advantages, and the algorithm computes none: leave them out")
    both = [torch.where(mask, values, 0.0).double() for values in (advantages, experience.logprobs["actor"])]
    count = mask.sum().clamp(min=1)
    first, second = (values - values.sum() / count for values in both)
    return torch.where(mask, first * second, 0.0)
