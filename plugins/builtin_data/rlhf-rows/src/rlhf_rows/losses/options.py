"""Options of the losses, for algorithms to inherit. Imports no torch."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rlhf_host import AlgoNeeds, Output, RoleNeed

PreferenceLossName: TypeAlias = Literal[
    "sigmoid",
    "sigmoid_norm",
    "hinge",
    "ipo",
    "ipo_sum",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
    "orpo",
]
SMOOTHED = ("sigmoid", "sigmoid_norm", "robust", "exo_pair")
"""Preference losses with ``label_smoothing``."""
ONE_BY_ONE = ("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down")
"""Preference losses that compare each completion with the reference, not only the two with each other."""


class SupervisedOptions(BaseModel):
    """Options of the supervised loss. An algorithm's ``Options`` inherits this class."""

    model_config = ConfigDict(extra="forbid")

    loss: Literal["nll", "dft"] = Field(
        "nll", description="nll: negative log-likelihood; dft: the same, each token weighted by its own probability"
    )


class PreferenceOptions(BaseModel):
    """Options of the preference losses. An algorithm's ``Options`` inherits this class."""

    model_config = ConfigDict(extra="forbid")

    loss: PreferenceLossName = Field(
        "sigmoid",
        description="preference loss; ipo, sigmoid_norm (SimPO) and orpo compare means over tokens, all others sums",
    )
    beta: float = Field(0.1, gt=0, description="scale of the implicit rewards; ipo: 1/(2 beta) is the gap to reach")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="share of pairs whose order may be wrong: sigmoid, sigmoid_norm, robust, exo_pair"
    )
    gamma: float = Field(0.0, ge=0, description="sigmoid, sigmoid_norm: margin by which the chosen reward must lead (SimPO)")
    reference_free: bool = Field(
        False, description="no reference model: log-probabilities in place of log-ratios; always in orpo"
    )
    ld_alpha: float | None = Field(
        None, ge=0, le=1, description="weight of the tokens beyond the length of the shorter of the two completions (LD-DPO)"
    )
    discopop_tau: float = Field(0.05, gt=0, description="discopop: temperature of the blend")
    nll_coef: float | None = Field(
        None, ge=0, description="weight of the negative log-likelihood of the chosen; default: 1 for orpo, 0 for the others"
    )
    nll_mean: Literal["tokens", "rows"] = Field(
        "tokens", description="the mean of that: over all chosen tokens, or over the means of the chosen rows"
    )

    @model_validator(mode="after")
    def _fits_the_loss(self) -> PreferenceOptions:
        if self.label_smoothing and self.loss not in SMOOTHED:
            raise ValueError(f"loss {self.loss} has no label_smoothing: set it to 0, or loss to one of {', '.join(SMOOTHED)}")
        if self.loss == "exo_pair" and not self.label_smoothing:
            raise ValueError("loss exo_pair divides by label_smoothing: set it above 0, such as 1e-3")
        if self.gamma and self.loss not in ("sigmoid", "sigmoid_norm"):
            raise ValueError(f"loss {self.loss} has no gamma: set it to 0, or loss to sigmoid or sigmoid_norm")
        if self.reference_free and self.loss in ONE_BY_ONE:
            raise ValueError(f"loss {self.loss} compares each completion with the reference: leave reference_free out")
        if self.ld_alpha is not None and self.averages:
            raise ValueError(f"loss {self.loss} takes means over tokens, ld_alpha weighs sums: leave it out")
        return self

    @property
    def averages(self) -> bool:
        """True if the loss compares means over tokens, not sums."""
        return self.loss in ("ipo", "sigmoid_norm", "orpo")

    @property
    def without_reference(self) -> bool:
        """True if no reference model is needed."""
        return self.reference_free or self.loss == "orpo"

    @property
    def nll_weight(self) -> float:
        """``nll_coef``, or its default."""
        return float(self.loss == "orpo") if self.nll_coef is None else self.nll_coef


REFERENCE = (RoleNeed("reference", source="actor"),), (Output("logprobs", "reference"),)
"""Roles and outputs of a loss that compares with the weights at the start of the run."""


def preference_needs(options: PreferenceOptions, *, lr: float | None = None) -> AlgoNeeds:
    """Returns the needs of an algorithm with a preference loss: pairs, a trainable actor, and the reference unless the loss has
    none.
    """
    roles, outputs = ((), ()) if options.without_reference else REFERENCE
    actor = RoleNeed("actor", trainable=True, source=None, lr=lr)
    return AlgoNeeds(data="preference", roles=(actor, *roles), outputs=outputs, rewards=False, unit_rows=True)
