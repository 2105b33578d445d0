"""DRO: single answers with a number, a policy and a value that explain it together (arXiv:2405.19107)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field
from rlhf_rows import losses

from rlhf_host import Batch, LossTerm, Metric, Needs, Output, Outputs, RoleNeed, hookimpl
from rlhf_host import functional as F

if TYPE_CHECKING:
    from torch import Tensor


class DROOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tau: float = Field(1.0, gt=0, description="weight of the KL from the reference")


class DRO:
    """DRO: answers with a reward, one by one; a critic learns the value of prompts, and the policy what is above it.

    ``½·(r(x, y) − V(x) − τ·log(π(y)/ref(y)))²``, a mean over answers, minimised by the critic's ``V`` and by the policy, whose
    gradient is divided by ``τ`` (arXiv:2405.19107, DRO-V).
    """

    Options = DROOptions

    def __init__(self, options: DROOptions):
        self.options = options

    @hookimpl
    def needs(self) -> Needs:
        roles, outputs = losses.REFERENCE
        actor = RoleNeed("actor", trainable=True, source=None, lr=1e-6)
        critic = RoleNeed("critic", head="scalar", trainable=True, source="actor", lr=1e-5)
        own = Output("values"), Output("values", role="critic"), Output("logprobs", role="actor")
        return Needs(data="rated", roles=(actor, critic, *roles), outputs=(*own, *outputs), rewards=False)

    @hookimpl
    def compute_loss(self, role: str, outputs: Outputs, batch: Batch) -> list[LossTerm | Metric]:
        """Returns the term of one role; the other is as it was at the start of the step."""
        tau, trained, rewards = self.options.tau, batch.loss_mask.any(-1), rewards_of(batch)
        logprobs, values = outputs.logprobs, batch.values["critic"]
        if role == "critic":
            logprobs, values = batch.logprobs["actor"], outputs.values
        if logprobs is None or values is None:
            raise ValueError("DRO needs outputs.logprobs of the actor and outputs.values of the critic")
        ratios = F.masked_sum(logprobs - batch.logprobs["reference"], batch.loss_mask, -1)
        value = at_start(values, batch.loss_mask)
        residual = rewards - value - tau * ratios
        if role == "critic":
            return [LossTerm("value", 0.5 * residual.square()), Metric("value", value.detach(), trained)]
        return [
            LossTerm("policy", 0.5 / tau * residual.square()),
            Metric("rewards", rewards, trained),
            Metric("residual", residual.detach().abs(), trained),
            Metric("kl_reference", ratios.detach(), trained),
        ]


def rewards_of(batch: Batch) -> Tensor:
    """Returns ``[B]``: the column ``reward``, or ``label`` in rows without it. Raises ``ValueError`` for rows without both."""
    found = [batch.columns[name] for name in ("reward", "label") if name in batch.columns]
    if not found:
        raise ValueError("the batch has neither a column 'reward' nor 'label': DRO trains on rated answers")
    return found[0] if len(found) == 1 else found[0].where(found[0].isfinite(), found[1])


def at_start(values: Tensor, mask: Tensor) -> Tensor:
    """Converts ``[B, T]`` to ``[B]``: the value before each row's first token in the mask, 0 for rows without any."""
    first = mask.float().argmax(-1, keepdim=True)
    return values.gather(-1, first).squeeze(-1).where(mask.any(-1), 0.0)
