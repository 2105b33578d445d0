"""Metrics that every actor update reports: mismatch with the sampler, movement, entropy, corrections."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rlhf_host.functional.kl import kl_estimate
from rlhf_host.records.tensors import Batch, Metric, Outputs
from rlhf_host.training.corrections import Corrections

_MEASURED = ("loss", "grad_norm", "lr", "entropy", "mismatch/mean", "mismatch/max", "mismatch/k3", "kl/update", "ratio/max_log")
_OF_CORRECTIONS = ("mean", "max", "zeroed", "unknown", "unused", "ess")
RESERVED = {*_MEASURED, *(f"correction/{name}" for name in _OF_CORRECTIONS)}
"""Metric names that belong to the host; plugins cannot use them."""


@torch.no_grad()
def actor_metrics(
    outputs: Outputs, batch: Batch, corrections: Corrections | None, *, sampled_now: bool, against_sampler: bool
) -> Iterable[Metric]:
    """Returns the actor's metrics of one micro-batch: all but the entropy over the tokens in the loss.

    Args:
        sampled_now: the weights are still those that sampled, so the mismatch between sampler and trainer can be measured.
        against_sampler: ``old_logprobs`` are the sampler's.
    """
    assert outputs.logprobs is not None
    mask, logprobs = batch.loss_mask, outputs.logprobs.detach()
    trainer = logprobs if against_sampler or batch.old_logprobs is None else batch.old_logprobs
    metrics = []
    if sampled_now:
        sampled = batch.sampled_mask & mask  # some rows may be of another model, of nobody, or greedy
        gap = torch.where(sampled, trainer - batch.sampler_logprobs, 0.0)
        metrics += [
            Metric("mismatch/mean", gap.abs(), sampled),
            Metric("mismatch/max", gap.abs(), sampled, reduce="max"),
            Metric("mismatch/k3", kl_estimate(batch.sampler_logprobs, trainer, sampled, "k3"), sampled),
        ]
    if batch.old_logprobs is not None:
        metrics += [
            Metric("kl/update", kl_estimate(batch.old_logprobs, logprobs, mask, "k3"), mask),
            Metric("ratio/max_log", torch.where(mask, logprobs - batch.old_logprobs, 0.0).abs(), mask, reduce="max"),
        ]
    if outputs.entropy is not None:
        metrics.append(Metric("entropy", outputs.entropy.detach(), batch.action_mask))
    if corrections is not None:
        weights = corrections.tokens
        metrics += [
            Metric("correction/mean", weights, batch.loss_mask),
            Metric("correction/max", weights, batch.loss_mask, reduce="max"),
            Metric("correction/zeroed", (weights == 0).float(), batch.loss_mask),
            Metric("correction/unknown", (~batch.sampled_mask).float(), batch.loss_mask),
            Metric("correction/ess", weights, batch.loss_mask, reduce="ess"),
        ]
    return metrics
