"""The supervised loss per token, unreduced."""

from __future__ import annotations

import torch

from rlhf_host import Batch, LossTerm, Metric, Outputs
from rlhf_rows.losses.options import SupervisedOptions


def supervised_loss(outputs: Outputs, batch: Batch, options: SupervisedOptions) -> list[LossTerm | Metric]:
    """Returns the term of one micro-batch: a mean over the trained tokens of the optimizer batch.

    ``nll``: ``−log π``. ``dft``: ``−sg(π)·log π`` (Dynamic Fine-Tuning, arXiv:2508.05629, eq. 9). Masked positions may have any
    values.
    """
    if outputs.logprobs is None:
        raise ValueError("a supervised loss needs outputs.logprobs")
    mask = batch.loss_mask
    logprobs = torch.where(mask, outputs.logprobs, 0.0)
    values = -logprobs if options.loss == "nll" else -logprobs.detach().exp() * logprobs
    return [LossTerm("supervised", values), Metric("nll", -logprobs.detach(), mask)]
