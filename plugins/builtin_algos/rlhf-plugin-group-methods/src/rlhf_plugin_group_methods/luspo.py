"""LUSPO: GSPO whose rows count by their lengths."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from rlhf_host import SEQUENCE_MEAN_TOKEN_SUM, Batch, LossTerm, Metric, Outputs, hookimpl
from rlhf_plugin_group_methods.group import LossOptions, OwnLoss


class LUSPOOptions(LossOptions):
    clip_eps: float = Field(2e-3, ge=0, lt=1, description="the row's ratio stays above 1 - clip_eps")
    clip_eps_high: float = Field(2.5e-3, ge=0, description="the row's ratio stays below 1 + clip_eps_high")


class LUSPO(OwnLoss):
    """LUSPO: GSPO's ratio of the whole row, and losses summed over its tokens, so that long rows count no less."""

    Options = LUSPOOptions
    options: LUSPOOptions

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> Iterator[LossTerm | Metric]:
        """Computes ``−|y_i|·min(s_i·A_i, clip(s_i)·A_i)`` with ``s_i = exp(mean_t log ρ_it)``, a mean over episodes
        (arXiv:2602.05261).
        """
        import torch

        from rlhf_plugin_group_methods.ratios import row_mean, terms

        of = terms(outputs, batch)
        ratio = row_mean(of.gap, of.mask).exp().unsqueeze(-1)
        plain = ratio * of.advantages
        clipped = ratio.clamp(1 - self.options.clip_eps, 1 + self.options.clip_eps_high) * of.advantages
        yield LossTerm("policy", -torch.minimum(plain, clipped), aggregation=SEQUENCE_MEAN_TOKEN_SUM, corrected=True)
        yield Metric("clip_fraction", (clipped < plain).float(), of.mask)
