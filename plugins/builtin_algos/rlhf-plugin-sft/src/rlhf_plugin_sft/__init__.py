"""Supervised fine-tuning: the negative log-likelihood of completions."""

from __future__ import annotations

from rlhf_rows import losses

from rlhf_host import Batch, LossTerm, Metric, Needs, Outputs, RoleNeed, hookimpl


class SFT:
    """Supervised fine-tuning: the negative log-likelihood of completions, a mean over the trained tokens of the batch."""

    Options = losses.SupervisedOptions

    def __init__(self, options: losses.SupervisedOptions):
        self.options = options

    @hookimpl
    def needs(self) -> Needs:
        actor = RoleNeed("actor", trainable=True, source=None, lr=2e-5)
        return Needs(data="prompt_completion", roles=(actor,), rewards=False)

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> list[LossTerm | Metric]:
        return losses.supervised_loss(outputs, batch, self.options)
