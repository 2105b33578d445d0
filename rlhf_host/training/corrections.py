"""Sampler-to-trainer weights, multiplied over plugins."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from rlhf_host.errors import RunError
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.records.needs import CorrectionNeeds
from rlhf_host.records.tensors import Batch, Outputs, PolicyLogprobs
from rlhf_host.training.deferred_values import DeferredValues

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Corrections:
    """Weights of a micro-batch, for each shape of loss."""

    tokens: Tensor
    """``[b, t]``: product of all weights; 1 outside the action tokens."""
    rows: Tensor
    """``[b]``: product of the weights of shape ``[b]``."""
    keys: frozenset[str]
    """Plugins that gave weights."""
    row_keys: frozenset[str]
    """Plugins whose weights have shape ``[b]``."""

    def of(self, values: Tensor) -> tuple[Tensor, frozenset[str]]:
        """Returns the weights that multiply a loss of this shape, and the plugins that gave them."""
        return (self.rows, self.row_keys) if values.dim() == 1 else (self.tokens, self.keys)


@torch.no_grad()
def correction_weights(
    hooks: PluginManager, outputs: Outputs, batch: Batch, *, gates_only: bool, readings: DeferredValues | None = None
) -> Corrections | None:
    """Returns the product of all plugins' weights, or None if no plugin gives any.

    Args:
        gates_only: only zeros act, because the ratio is taken against the sampler and so includes the weight already.
        readings: weights are examined when these are read; default: at once, which waits for their device.

    Raises:
        RunError: weights of the wrong shape, or (in ``readings``) negative or not finite at tokens in the loss.
    """
    if outputs.logprobs is None or batch.advantages is None or not hooks.has("importance_weights"):
        return None
    current, mask = outputs.logprobs.detach(), batch.action_mask
    old = current if batch.old_logprobs is None or gates_only else batch.old_logprobs
    logprobs = PolicyLogprobs(current, old, batch.sampler_logprobs)
    answers = [*_answers(hooks, logprobs, batch)]
    tokens, rows = torch.ones_like(current), current.new_ones(len(batch))
    row_keys: set[str] = set()
    needs, later = hooks.needs(), DeferredValues() if readings is None else readings
    for key, weight in answers:
        if CorrectionNeeds.of(needs.get(key)).weights == "row" and weight.dim() == 2:
            raise RunError(f"{key} gave weights of tokens, {list(weight.shape)}, and its needs say weights='row': return [B]")
        others = mask.new_zeros(())
        if gates_only:
            counts = mask if weight.dim() == 2 else mask.any(-1)
            others = ((weight != 0) & (weight != 1) & counts).any()
            weight = weight != 0
        weight = weight.to(tokens.dtype)
        # What the plugin left in masked places would reach the gradient as 0·NaN.
        if weight.dim() == 1:
            rows = rows * torch.where(mask.any(-1), weight, 1.0)
            weight = weight.unsqueeze(-1)
            row_keys.add(key)
        used = torch.where(batch.loss_mask, weight, 1.0)
        finite = torch.isfinite(used)
        later.take(torch.stack([others, finite.all(), (finite & (used >= 0)).all()]), partial(_examine, key))
        tokens = tokens * torch.where(mask, weight, 1.0)
    if readings is None:
        later.read()
    return Corrections(tokens, rows, frozenset(key for key, _ in answers), frozenset(row_keys))


def _answers(hooks: PluginManager, logprobs: PolicyLogprobs, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """Yields each plugin's weights, if it gives some. A plugin sees its own ``prepare_batch`` as ``batch.own``."""
    for key in hooks.names("importance_weights"):
        batch.own = batch.extra.get(hooks.by_key[key].alias, {})
        if (weights := hooks.call(key, "importance_weights", logprobs=logprobs, batch=batch)) is not None:
            yield key, weights


def _examine(key: str, findings: list[float]) -> None:
    """Examines weights: whether some are neither 0 nor 1 where these alone act, whether all are finite, and not negative too."""
    others, finite, sound = findings
    _say_what_acts(key, bool(others))
    if not sound:
        what = "negative" if finite else "non-finite"
        raise RunError(f"{key} gave {what} numbers from importance_weights, at tokens in the loss")


@cache
def say_unused(keys: str) -> None:
    """Warns, once, of plugins whose weights no loss term has taken, if there are any."""
    if keys:
        log.warning("%s: no loss term has taken its weights so far; those with corrected=True do, a term [B] only [B]", keys)


@cache
def _say_what_acts(key: str, others: bool) -> None:
    """Warns, once per plugin, if weights other than 0 and 1 have no effect."""
    if others:
        log.warning(
            "%s gives weights other than 0 and 1, and with train.old_logprobs sampler only those that are 0 act: set"
            " --train.old-logprobs recompute (in a plugin: forbid sampler)",
            key,
        )
