"""Distillation: a student learns to predict what a teacher predicts, on a data set or on its own answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlhf_host import (
    Advantages,
    AlgoNeeds,
    Batch,
    Experience,
    LossTerm,
    Metric,
    Needs,
    Output,
    Outputs,
    RoleNeed,
    hookimpl,
)
from rlhf_host import functional as F
from rlhf_plugin_distill.options import DivergenceOptions, OnPolicyOptions, Options
from rlhf_plugin_distill.sdpo import SDPO

__all__ = ["SDPO", "Distill", "OnPolicyDistill"]

TEACHER = RoleNeed("teacher", source=None)


class Distill:
    """Distillation on a data set: at each trained token the student's distribution is pulled towards the teacher's."""

    Options = Options

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    def needs(self) -> Needs:
        actor = RoleNeed("actor", trainable=True, source=None, lr=2e-5)
        outputs = (distribution(self.options),)
        return Needs(data="prompt_completion", roles=(actor, TEACHER), outputs=outputs, rewards=False)

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> Iterator[LossTerm | Metric]:
        """Computes ``(1 − α)·(−log π) + α·D``, a mean over trained tokens."""
        import torch

        if outputs.logprobs is None:
            return
        alpha, mask = self.options.alpha, batch.loss_mask
        yield from _divergence(outputs, batch, self.options, alpha, self.options.temperature)
        nll = torch.where(mask, -outputs.logprobs, 0.0)
        if alpha < 1:
            yield LossTerm("cross_entropy", nll, coefficient=1 - alpha)
        yield Metric("nll", nll.detach(), mask)


class OnPolicyDistill:
    """On-policy distillation: on the student's own answers, its distribution is pulled towards the teacher's."""

    Options = OnPolicyOptions

    def __init__(self, options: OnPolicyOptions):
        self.options = options

    @hookimpl
    def needs(self) -> Needs:
        if self.options.signal == "sample":
            teacher = Output("logprobs", role="teacher")
            return replace(F.policy_needs(self.options, roles=(TEACHER,), outputs=(teacher,)), rewards=False)
        actor = RoleNeed("actor", trainable=True, source=None)
        outputs = (distribution(self.options),)
        return AlgoNeeds(data="prompts", roles=(actor, TEACHER), outputs=outputs, rewards=False, weights=None)

    @hookimpl
    def compute_advantages(self, experience: Experience) -> Advantages:
        """Computes, for ``sample``, ``A_t = log π_T − log π_old``, whose mean over samples is ``−KL(π_old ‖ π_T)``, per token
        and not summed to the right (arXiv:2306.13649; Lu et al., "On-Policy Distillation", 2025). If ``π_old`` is the policy of
        the same pass, the sampler's log-probabilities are used instead, and tokens without them get 0.
        """
        import torch

        mask = experience.action_mask
        if self.options.signal == "full":
            return Advantages(torch.zeros(mask.shape))
        old = experience.old_logprobs
        if old is None:
            mask, old = experience.sampled_mask, experience.sampler_logprobs
        gap = torch.where(mask, experience.logprobs["teacher"] - old, 0.0)
        return Advantages(gap, metrics=[Metric("teacher/kl", -gap, mask)])

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> Iterator[LossTerm | Metric]:
        if self.options.signal == "sample":
            yield from F.policy_loss(outputs, batch, self.options)
        else:
            yield from _divergence(outputs, batch, self.options)


def distribution(options: DivergenceOptions) -> Output:
    return Output("distribution", role="teacher", top=options.top_k or None)


def _divergence(
    outputs: Outputs, batch: Batch, options: DivergenceOptions, weight: float = 1.0, temperature: float = 1.0
) -> Iterator[LossTerm | Metric]:
    from rlhf_plugin_distill.divergence import token_divergence

    values = token_divergence(outputs.others["teacher"], batch.loss_mask, options, temperature)
    yield LossTerm("divergence", values, coefficient=weight)
    yield Metric("divergence", values.detach(), batch.loss_mask)
