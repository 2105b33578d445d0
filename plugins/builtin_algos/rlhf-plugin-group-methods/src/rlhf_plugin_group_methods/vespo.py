"""VESPO: a smooth weight of the whole row in place of clipping (arXiv:2602.10693)."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from rlhf_host import Batch, LossTerm, Metric, Outputs, hookimpl
from rlhf_plugin_group_methods.group import LossOptions, OwnLoss


class VESPOOptions(LossOptions):
    k: float = Field(2.0, ge=0, description="power of the row's ratio, for advantages of 0 and above")
    lam: float = Field(3.0, gt=0, description="decay with the row's ratio, for advantages of 0 and above")
    k_negative: float = Field(3.0, ge=0, description="the power, for negative advantages")
    lam_negative: float = Field(2.0, gt=0, description="the decay, for negative advantages")


class VESPO(OwnLoss):
    """VESPO: the policy gradient times a smooth weight of the row's ratio, for batches that are old (arXiv:2602.10693)."""

    Options = VESPOOptions
    options: VESPOOptions
    weights = None

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> Iterator[LossTerm | Metric]:
        """Computes ``−sg(φ(Π_t ρ_it))·A_i·log π``, a mean over tokens."""
        from rlhf_plugin_group_methods.ratios import gamma_weight, terms

        of, options = terms(outputs, batch), self.options
        weight = gamma_weight(of, (options.k, options.k_negative), (options.lam, options.lam_negative))
        yield LossTerm("policy", -weight * of.advantages * of.logprobs, corrected=True)
        yield Metric("weight", weight, of.mask)
