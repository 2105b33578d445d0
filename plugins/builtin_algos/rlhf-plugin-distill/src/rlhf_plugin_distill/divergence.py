"""Divergences between a teacher's and a student's distribution of the next token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhf_host import Distribution
from rlhf_plugin_distill.options import DivergenceOptions

FULLEST = -1e-6
"""Largest log-probability of ``k`` tokens together, so that something is left for the others in spite of rounding."""


def token_divergence(both: Distribution, mask: Tensor, options: DivergenceOptions, temperature: float = 1.0) -> Tensor:
    """Returns ``[B, T]``: the divergence at each token, 0 outside ``mask``.

    Args:
        both: ``[B, T, k]`` or ``[B, T, V]``; masked places may have any values.
        mask: ``[B, T]`` bool.
        temperature: divides what ``both`` holds, of all tokens or as ``tail`` renormalises them.
    """
    teacher, student = (torch.where(mask.unsqueeze(-1), logs, 0.0) for logs in (both.logprobs, both.own))
    if options.top_k and options.tail == "bucket":
        teacher, student = with_tail(teacher), with_tail(student)
    elif options.top_k or temperature != 1:
        teacher, student = ((logs / temperature).log_softmax(-1) for logs in (teacher, student))
    return torch.where(mask, divergence(teacher, student, options.beta), 0.0)


def divergence(teacher: Tensor, student: Tensor, beta: float) -> Tensor:
    """Converts ``[..., k]`` log-probabilities of each to ``[...]``: ``KL(T ‖ S)`` for ``β = 0``, ``KL(S ‖ T)`` for ``β = 1``,
    between them ``β·KL(T ‖ M) + (1 − β)·KL(S ‖ M)`` with ``M = β·T + (1 − β)·S`` (GKD, arXiv:2306.13649, eqs. 1 and 2).
    """
    if beta == 0:
        return kl(teacher, student)
    if beta == 1:
        return kl(student, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """Returns ``Σ p·(log p − log q)``; tokens of probability 0 in ``p`` count nothing."""
    weights = p.exp()
    return (weights * torch.where(weights > 0, p - q, 0.0)).sum(-1)


def with_tail(logs: Tensor) -> Tensor:
    """Converts ``[..., k]`` to ``[..., k + 1]``: the last is the probability of all other tokens together."""
    together = logs.logsumexp(-1, keepdim=True).clamp(max=FULLEST)
    return torch.cat([logs, torch.log(-torch.expm1(together))], -1)
