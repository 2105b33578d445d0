"""Direct preference optimization: DPO, conservative DPO, IPO, CPO and TPO, with the other losses of pairs as an option."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from pydantic import Field, field_validator
from rlhf_rows import losses

from rlhf_host import Batch, Experience, LossTerm, Metric, Needs, Outputs, hookimpl


class DPO:
    """DPO: the chosen completion must be likelier than the rejected one, compared with the reference (arXiv:2305.18290)."""

    Options = losses.PreferenceOptions

    def __init__(self, options: losses.PreferenceOptions):
        self.options = options

    @hookimpl
    def needs(self) -> Needs:
        return losses.preference_needs(self.options, lr=1e-6)

    @hookimpl
    def prepare_batch(self, experience: Experience) -> dict[str, Any]:
        return losses.prepared_pairs(experience, self.options)

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> list[LossTerm | Metric]:
        return losses.preference_loss(outputs, batch, self.options)


class ConservativeOptions(losses.PreferenceOptions):
    label_smoothing: float = Field(0.1, ge=0, lt=0.5, description="share of pairs whose order may be wrong")


class CDPO(DPO):
    """Conservative DPO: a share of the pairs may be in the wrong order (Mitchell, "A note on DPO with noisy preferences")."""

    Options = ConservativeOptions


class IPOOptions(losses.PreferenceOptions):
    loss: losses.PreferenceLossName = Field("ipo", description="preference loss: ipo compares means over tokens, ipo_sum sums")


class IPO(DPO):
    """IPO: the gap between chosen and rejected goes to 1/(2 beta), not further (arXiv:2310.12036)."""

    Options = IPOOptions


class CPOOptions(losses.PreferenceOptions):
    loss: Literal["sigmoid", "sigmoid_norm", "hinge", "ipo"] = Field(
        "sigmoid", description="preference loss; sigmoid_norm (CPO-SimPO) and ipo compare means over tokens, the others sums"
    )
    reference_free: bool = Field(True, description="always true: there is no reference model")
    nll_coef: float = Field(1.0, ge=0, description="weight of the negative log-likelihood of the chosen")

    @field_validator("reference_free")
    @classmethod
    def _has_none(cls, value: bool) -> bool:
        if not value:
            raise ValueError(f"{cls.__name__[:3]} has no reference model: leave reference_free out, or take dpo")
        return value


class CPO(DPO):
    """CPO: the chosen completion must be likelier than the rejected one, and likely itself, without a reference.

    ``−log σ(β·log π(chosen) − β·log π(rejected))`` plus ``−log π(chosen)``, a mean over the chosen tokens (arXiv:2401.08417,
    ``L_prefer`` and ``L_NLL`` of the CPO loss).
    """

    Options = CPOOptions


class TPOOptions(CPOOptions):
    beta: float = Field(0.01, gt=0, description="scale of the implicit rewards, beta·log π")
    loss: Literal["sigmoid", "sigmoid_norm", "hinge", "ipo"] = Field(
        "sigmoid", description="preference loss; sigmoid_norm (TPO-L) and ipo compare means over tokens, the others sums"
    )
    nll_coef: float = Field(1.0, ge=0, description="weight of the negative log-likelihood of the gold answer")


class TPO(CPO):
    """TPO: CPO whose likelihood is that of a third, gold answer, the column ``reference`` of the data.

    ``−log σ(β·log π(chosen) − β·log π(rejected))`` plus ``−log π(gold)`` (arXiv:2405.16681), a mean over the gold tokens.
    """

    Options = TPOOptions

    @hookimpl
    def needs(self) -> Needs:
        return dataclasses.replace(losses.preference_needs(self.options, lr=1e-6), data="triple")

    @hookimpl
    def prepare_batch(self, experience: Experience) -> dict[str, Any]:
        gold = experience.loss_mask & (experience.columns["gold"] == 1).unsqueeze(-1)
        return {"chosen": gold} if self.options.nll_weight > 0 else {}
