"""M2PO: old batches without the tokens that have moved most, and without a clip (arXiv:2510.01161)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from rlhf_host import Batch, CorrectionNeeds, Experience, LossTerm, Metric, Needs, Output, Outputs, UserError, hookimpl

if TYPE_CHECKING:
    from torch import Tensor


class M2PO:
    """M2PO: the tokens whose probability has moved most get 0, until the second moment of what is left is within a bound
    (arXiv:2510.01161). In its paper that stands in the place of the clip: ``--algo.loss ratio``."""

    class Options(BaseModel, extra="forbid"):
        threshold: float = Field(0.04, gt=0, description="largest mean of (log π - log μ)² over the tokens that are left")

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    def needs(self) -> Needs:
        return CorrectionNeeds(outputs=(Output("logprobs", role="actor"),))

    @hookimpl
    def check_run(self, config: Mapping[str, Any]) -> None:
        """Refuses losses with a clip, which M2PO does not have."""
        algo = config["algo"] or {}
        if algo.get("loss", "clip") in ("clip", "gspo") and "clip_eps" in algo:
            has = f"algo.loss {algo['loss']}" if "loss" in algo else f"the loss of {algo['name']}"
            raise UserError(f"m2po leaves tokens out in the place of a clip, and {has} has one: set --algo.loss ratio")

    @hookimpl
    def prepare_batch(self, experience: Experience) -> dict[str, Tensor]:
        """Finds the most tokens of the whole batch, the smallest ``(log π − log μ)²`` first, whose mean is within the threshold."""
        import torch

        mask = experience.loss_mask & experience.sampled_mask
        moved = torch.where(mask, experience.logprobs["actor"] - experience.sampler_logprobs, 0.0).double().square()
        ordered, order = moved[mask].sort()
        within = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1) <= self.options.threshold
        kept = torch.zeros(len(ordered), dtype=torch.bool).index_put((order,), within)
        return {"kept": torch.ones(mask.shape, dtype=torch.bool).masked_scatter(mask, kept)}

    @hookimpl
    def importance_weights(self, batch: Batch) -> Tensor:
        return batch.own["kept"].float()

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> list[LossTerm | Metric]:
        """Returns no loss, only the fraction of tokens that were left out."""
        return [Metric("m2po/left_out", (~batch.own["kept"]).float(), batch.loss_mask)]
