"""Training of process reward models on steps that are marked right or wrong (arXiv:2305.20050)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import AlgoNeeds, Batch, Experience, LossTerm, Metric, Output, Outputs, RoleNeed, hookimpl

if TYPE_CHECKING:
    from torch import Tensor


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

    separator: str = Field(
        "\n", min_length=1, description="the text after each step; a step's score is read at the separator's last token"
    )
    last_step_only: bool = Field(False, description="only the last step of a completion counts")


class ProcessRewardModel:
    """A process reward model: the score after each step tells if the step is right."""

    Options = Options

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    def needs(self) -> AlgoNeeds:
        actor = RoleNeed("actor", head="scalar", trainable=True, source=None, lr=1e-5)
        outputs, separator = (Output("token_scores"),), self.options.separator
        return AlgoNeeds(data="stepwise", roles=(actor,), outputs=outputs, rewards=False, separator=separator)

    @hookimpl
    def loss_masks(self, experience: Experience) -> Tensor:
        """Returns the tokens that have a label, or each row's last one."""
        steps = experience.action_mask & labels(experience).isfinite()
        return steps & (steps.flip(-1).cumsum(-1).flip(-1) == 1) if self.options.last_step_only else steps

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> Iterator[LossTerm | Metric]:
        """Computes ``−y·log σ(s) − (1 − y)·log(1 − σ(s))``, a mean over the steps: ``s`` the score at the separator, ``y`` its
        label, 0, 1 or between (arXiv:2305.20050, section 2.6; arXiv:2312.08935, eq. 3).
        """
        import torch
        from torch.nn.functional import binary_cross_entropy_with_logits

        if outputs.token_scores is None:
            return
        mask = batch.loss_mask
        targets, scores = (torch.where(mask, values, 0.0) for values in (labels(batch), outputs.token_scores))
        yield LossTerm("steps", binary_cross_entropy_with_logits(scores, targets.to(scores.dtype), reduction="none"))
        right, scores = targets > 0.5, scores.detach()
        yield Metric("accuracy", ((scores > 0) == right).float(), mask)
        probability = torch.where(right, scores, -scores).double().sigmoid()
        yield Metric("brier", (scores.sigmoid() - targets).square(), mask)
        yield Metric("calibration_error", probability, mask & ((targets == 0) | (targets == 1)), reduce="calibration")
        yield Metric("scores/right", scores, mask & right)
        yield Metric("scores/wrong", scores, mask & ~right)


def labels(batch: Batch) -> Tensor:
    """Returns ``[B, T]``: NaN at tokens that do not end a step."""
    if "step" not in batch.token_columns:
        raise ValueError("the batch has no token column 'step': train on stepwise data")
    return batch.token_columns["step"]
