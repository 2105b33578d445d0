"""Estimators of the divergence from a reference policy (Schulman, "Approximating KL divergence", 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_host.functional.policy import MAX_LOG, importance_ratio


def kl_estimate(logprobs: Tensor, reference: Tensor, mask: Tensor, estimator: str = "k1") -> Tensor:
    """Returns the per-token estimate of ``KL(π ‖ ref)``, ``[B, T]`` in nats, 0 outside ``mask``.

    With ``x = log π − log ref``: ``k1 = x``, ``k2 = x²/2``, ``k3 = e^{−x} − 1 + x``.

    Raises:
        ValueError: the estimator is unknown.
    """
    # Sanitised before exp: a where after it would still give NaN gradients.
    x = torch.where(mask, logprobs - reference, 0.0)
    if estimator == "k1":
        return x
    if estimator == "k2":
        return 0.5 * x.square()
    if estimator == "k3":
        x = x.clamp(-MAX_LOG, MAX_LOG)
        return torch.expm1(-x) + x
    raise ValueError(f"unknown KL estimator {estimator!r}: k1, k2 or k3")


def kl_loss(
    logprobs: Tensor, reference: Tensor, mask: Tensor, estimator: str = "unbiased", sampling_logprobs: Tensor | None = None
) -> Tensor:
    """Returns a per-token loss whose gradient moves π towards the reference, ``[B, T]``, 0 outside ``mask``.

    ``unbiased``: ``w·x²/2`` with ``w = sg(min(π/π_sampling, 10))``, whose expected gradient is that of ``KL(π ‖ ref)``; ``w = 1``
    where ``π_sampling`` is unknown (NaN). ``k2`` is the same with ``w = 1``. ``k3`` is biased; it is here because published GRPO
    code uses it.

    Raises:
        ValueError: the estimator is ``k1`` (its expected gradient is zero), or unknown.
    """
    if estimator == "unbiased":
        value = kl_estimate(logprobs, reference, mask, "k2")
        if sampling_logprobs is None:
            return value
        return importance_ratio(logprobs.detach(), sampling_logprobs, mask & ~sampling_logprobs.isnan()).clamp(max=10.0) * value
    if estimator in ("k2", "k3"):
        return kl_estimate(logprobs, reference, mask, estimator)
    raise ValueError(f"KL estimator {estimator!r} cannot be a loss: unbiased, k2 or k3 (k1 has zero expected gradient)")
