"""Sampler-to-trainer weights, multiplied over plugins."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_host.errors import RunError
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.records.tensors import Experience, Outputs


@torch.no_grad()
def correction_weights(hooks: PluginManager, outputs: Outputs, batch: Experience, *, gates_only: bool) -> Tensor | None:
    """``[b, t]``; ``None`` when no plugin asks for any.

    Args:
        gates_only: the ratio is taken against the sampler, so the weight is in it already, and only zeros may act.
    """
    if outputs.logprobs is None or batch.advantages is None or not hooks.has("importance_weights"):
        return None
    current, mask = outputs.logprobs.detach(), batch.action_mask
    logprobs = current if batch.old_logprobs is None or gates_only else batch.old_logprobs
    answers = hooks.each(
        "importance_weights",
        logprobs=logprobs,
        sampler_logprobs=batch.sampler_logprobs,
        current_logprobs=current,
        advantages=batch.advantages,
        mask=mask,
    )
    weights = torch.ones_like(current)
    for key, weight in answers:
        if not isinstance(weight, Tensor) or weight.shape != mask.shape:
            shape = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
            raise RunError(f"{key} gave {shape} from importance_weights, expected a tensor {list(mask.shape)}")
        weight = weight != 0 if gates_only else weight
        # What the plugin left in masked places would reach the gradient as 0·NaN.
        weights = weights * torch.where(mask, weight.to(weights.dtype), 1.0)
    return weights
