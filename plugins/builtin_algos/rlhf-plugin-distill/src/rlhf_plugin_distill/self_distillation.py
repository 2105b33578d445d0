"""Loss of a policy against itself under another prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_host import Batch, Outputs
from rlhf_host import functional as F
from rlhf_plugin_distill.divergence import token_divergence
from rlhf_plugin_distill.options import SDPOOptions


def self_distillation(outputs: Outputs, batch: Batch, options: SDPOOptions) -> Tensor:
    """Returns ``[B, T]``: the loss at each token, 0 where the teacher has no hint (arXiv:2601.20802, section 3)."""
    if outputs.logprobs is None:
        raise ValueError("self-distillation needs outputs.logprobs")
    mask = batch.own["taught"]
    logprobs = torch.where(mask, outputs.logprobs, 0.0)
    if options.signal == "full":
        values = token_divergence(outputs.others["teacher"], mask, options)
    else:
        values = torch.where(mask, logprobs.detach() - batch.logprobs["teacher"], 0.0) * logprobs
    if batch.old_logprobs is not None:
        values = values * F.importance_ratio(logprobs.detach(), batch.old_logprobs, mask).clamp(max=options.ratio_max)
    return values
