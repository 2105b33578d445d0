"""Tokens chosen by how much they cost, or have, of the policy's entropy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rlhf_host import Batch, CorrectionNeeds, Experience, LossTerm, Metric, Needs, Output, Outputs, UserError, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ClipCov", "KLCov", "TopEntropy"]

LOGPROBS = Output("logprobs", role="actor")


class ClipCov:
    """Clip-Cov: a few of the tokens that would cost most entropy get no gradient (arXiv:2505.22617)."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        share: float = Field(2e-4, gt=0, le=1, description="share of the batch's tokens that are drawn, at least one")
        low: float = Field(1.0, description="smallest covariance of those among which they are drawn")
        high: float = Field(5.0, description="largest covariance of those")

        @model_validator(mode="after")
        def _ordered(self) -> ClipCov.Options:
            if self.low >= self.high:
                raise ValueError(f"low {self.low:g} is not below high {self.high:g}")
            return self

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    def needs(self) -> Needs:
        return CorrectionNeeds(outputs=(LOGPROBS,))

    @hookimpl
    def prepare_batch(self, experience: Experience) -> dict[str, Tensor]:
        """Draws tokens whose covariance is between the limits; which ones is fixed by the step (eq. 11)."""
        import torch

        from rlhf_plugin_entropy.covariance import covariance

        mask, values = experience.loss_mask, covariance(experience)
        among = (mask & (values > self.options.low) & (values < self.options.high)).flatten().nonzero().squeeze(-1)
        count = max(1, int(self.options.share * int(mask.sum())))
        drawn = among[torch.randperm(len(among), generator=torch.Generator().manual_seed(experience.step))[:count]]
        kept = torch.ones(mask.numel(), dtype=torch.bool).index_fill(0, drawn, False)
        return {"kept": kept.view(mask.shape)}

    @hookimpl
    def importance_weights(self, batch: Batch) -> Tensor:
        return batch.own["kept"].float()

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> list[LossTerm | Metric]:
        """Returns no loss, only the fraction of tokens that were drawn."""
        return [Metric("clip_cov/drawn", (~batch.own["kept"]).float(), batch.loss_mask)]


class KLCov:
    """KL-Cov: the tokens that would cost most entropy are held where they were (arXiv:2505.22617)."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        share: float = Field(2e-4, gt=0, le=1, description="share of the batch's tokens that are held, at least one")
        coef: float = Field(1.0, gt=0, description="weight of the penalty")

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    def needs(self) -> Needs:
        return Needs(outputs=(LOGPROBS,))

    @hookimpl
    def check_run(self, config: Mapping[str, Any], tokenizers: Mapping[str, Any]) -> None:
        train = config["train"]
        if train["epochs"] * train["minibatches"] == 1:
            raise UserError(
                "kl_cov holds tokens where they were before the step, which one update per batch does not see: set"
                " train.minibatches or train.epochs to 2 or more, or take clip_cov"
            )

    @hookimpl
    def prepare_batch(self, experience: Experience) -> dict[str, Tensor]:
        """Finds the tokens of the highest covariance (eq. 13)."""
        import torch

        from rlhf_plugin_entropy.covariance import covariance

        mask = experience.loss_mask
        values = covariance(experience)[mask]
        count = min(len(values), max(1, int(self.options.share * len(values))))
        held = torch.zeros(len(values), dtype=torch.bool).index_fill(0, values.topk(count).indices, True)
        return {"held": torch.zeros(mask.shape, dtype=torch.bool).masked_scatter(mask, held)}

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> Iterator[LossTerm | Metric]:
        """Computes ``coef·|log π − log π_old|`` at these tokens, a mean over all tokens in the loss."""
        import torch

        assert outputs.logprobs is not None
        held = batch.own["held"] & batch.loss_mask
        moved = torch.where(held, outputs.logprobs - batch.logprobs["actor"], 0.0).abs()
        yield LossTerm("kl_cov", moved, coefficient=self.options.coef)
        yield Metric("kl_cov/moved", moved.detach(), held)


class TopEntropy:
    """Only the tokens of the highest entropy train, where the policy decides (arXiv:2506.01939)."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        share: float = Field(0.2, gt=0, lt=1, description="share of the batch's tokens that train")

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    def needs(self) -> Needs:
        return CorrectionNeeds(outputs=(Output("entropy", role="actor"),))

    @hookimpl
    def prepare_batch(self, experience: Experience) -> dict[str, Tensor]:
        """Finds the tokens whose entropy is at or above the batch's quantile ``1 − share`` (eq. 6)."""
        import torch

        mask = experience.loss_mask
        values = torch.where(mask, experience.entropy["actor"], 0.0)
        known = values[mask].double().sort().values
        if not len(known):
            return {"kept": ~mask}
        # The linear quantile, of more numbers than torch.quantile takes.
        place = (1 - self.options.share) * (len(known) - 1)
        low, high = known[int(place)], known[min(int(place) + 1, len(known) - 1)]
        return {"kept": (values >= low + (high - low) * (place - int(place))) | ~mask}

    @hookimpl
    def importance_weights(self, batch: Batch) -> Tensor:
        return batch.own["kept"].float()

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> list[LossTerm | Metric]:
        """Returns no loss, only the fraction of tokens that train."""
        return [Metric("top_entropy/kept", batch.own["kept"].float(), batch.loss_mask)]
