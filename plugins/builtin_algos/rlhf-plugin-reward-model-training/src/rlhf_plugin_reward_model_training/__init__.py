"""Training of reward models on pairs (Bradley-Terry), and of process reward models on steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from rlhf_rows import losses

from rlhf_host import AlgoNeeds, Batch, LossTerm, Metric, Output, Outputs, RoleNeed, hookimpl
from rlhf_plugin_reward_model_training.process import ProcessRewardModel

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["ProcessRewardModel", "RewardModel"]


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

    margin: Literal["auto", "off"] = Field(
        "auto", description="auto: the data's column margin, where a pair has one; off: none"
    )
    center_rewards_coefficient: float | None = Field(
        None,
        ge=0,
        description="weight of the squared sum of a pair's scores, which keeps them around 0, such as 0.01; none: off",
    )


class RewardModel:
    """A reward model: the score of the chosen completion must be above the rejected one's (Bradley-Terry)."""

    Options = Options

    def __init__(self, options: Options):
        self.options = options
        self.statistics: dict[str, float] = {}
        """``mean`` and ``std`` of the scores of the last evaluation's completions."""

    @hookimpl
    def needs(self) -> AlgoNeeds:
        actor = RoleNeed("actor", head="scalar", trainable=True, source=None, lr=1e-5)
        return AlgoNeeds(data="preference", roles=(actor,), outputs=(Output("scores"),), rewards=False, unit_rows=True)

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> Iterator[LossTerm | Metric]:
        """Computes ``−log σ(s_c − s_r − margin)`` (arXiv:2203.02155, eq. 1; the margin as in Llama 2, arXiv:2307.09288, eq. 2),
        and ``(s_c + s_r)²`` (arXiv:2312.09244, eq. 2).
        """
        from torch.nn.functional import logsigmoid

        if outputs.scores is None:
            return
        places = chosen, rejected = losses.pairs(batch)
        better, worse = outputs.scores[chosen], outputs.scores[rejected]
        gap = better - worse
        yield LossTerm("pairs", losses.on_rows(-logsigmoid(gap - self._margin(batch, chosen)), *places))
        if self.options.center_rewards_coefficient:
            squares = losses.on_rows((better + worse).square(), *places)
            yield LossTerm("center", squares, coefficient=self.options.center_rewards_coefficient)
        gap = gap.detach()
        yield Metric("accuracy", (gap > 0).float())
        yield Metric("brier", gap.neg().sigmoid().square())
        yield Metric("calibration_error", gap.double().sigmoid(), reduce="calibration")
        yield Metric("scores/margin", gap)
        yield Metric("scores/chosen", better.detach())
        yield Metric("scores/rejected", worse.detach())
        yield Metric("scores/mean", (better + worse).detach().double() / 2)
        yield Metric("scores/square", (better.square() + worse.square()).detach().double() / 2)

    @hookimpl
    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes mean and population deviation of the scores from an evaluation, ``std² = E[s²] − E[s]²``."""
        mean, square = (metrics.get(f"eval/scores/{name}") for name in ("mean", "square"))
        if mean is not None and square is not None and math.isfinite(square) and square > mean * mean:
            self.statistics = {"mean": mean, "std": math.sqrt(square - mean * mean)}

    @hookimpl
    def saved_config(self, role: str) -> dict[str, float] | None:
        return dict(self.statistics) if role == "actor" else None

    @hookimpl
    def state_dict(self) -> dict[str, Any]:
        return dict(self.statistics)

    @hookimpl
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.statistics = dict(state)

    def _margin(self, batch: Batch, chosen: Tensor) -> Tensor | float:
        """Returns ``[P]`` margins; 0 if the data has none."""
        if self.options.margin == "off" or "margin" not in batch.columns:
            return 0.0
        return batch.columns["margin"][chosen].nan_to_num(0.0)
