"""GMPO: the geometric mean of a row's ratios in place of each of them (arXiv:2507.20673)."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from rlhf_host import Batch, LossTerm, Metric, Outputs, hookimpl
from rlhf_plugin_group_methods.group import LossOptions, OwnLoss


class GMPOOptions(LossOptions):
    clip_eps: float = Field(0.4, gt=0, description="a token's log-ratio counts at least -clip_eps")
    clip_eps_high: float = Field(0.4, gt=0, description="a token's log-ratio counts at most clip_eps_high")


class GMPO(OwnLoss):
    """GMPO: GRPO with the geometric mean of a row's ratios, which single outliers move less (arXiv:2507.20673)."""

    Options = GMPOOptions
    options: GMPOOptions
    weights = "row"

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> Iterator[LossTerm | Metric]:
        """Computes ``−A_i·exp(mean_t clip(log ρ_it))``, a mean over episodes."""
        from rlhf_plugin_group_methods.ratios import geometric_mean_loss, terms

        of = terms(outputs, batch)
        values, clipped = geometric_mean_loss(of, self.options.clip_eps, self.options.clip_eps_high)
        yield LossTerm("policy", values, corrected=True)
        yield Metric("clip_fraction", clipped.float(), of.mask)
