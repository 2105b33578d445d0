"""PPO: a critic's values, generalised advantage estimation, and a clipped value loss (arXiv:1707.06347, arXiv:1506.02438)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rlhf_host import Advantages, Batch, Experience, LossTerm, Metric, Needs, Output, Outputs, RoleNeed, hookimpl
from rlhf_host import functional as F

if TYPE_CHECKING:
    from torch import Tensor


class Options(F.PolicyLossOptions):
    gamma: float = Field(1.0, ge=0, le=1, description="discount per action token")
    lam: float = Field(1.0, ge=0, le=1, description="lambda of GAE for the advantages; below 1, they rely on the critic")
    lam_critic: float | None = Field(None, ge=0, le=1, description="lambda for the critic's targets; none: the value of lam")
    whiten: Literal["full", "center", "none"] = Field(
        "full", description="normalise advantages over the batch's tokens: mean 0 and variance 1, mean 0, or not at all"
    )
    value_clip: float | None = Field(
        0.5, gt=0, description="how far a value may move in an update before its loss stops falling; none: no limit"
    )
    critic_warmup: int = Field(0, ge=0, description="number of first steps in which only the critic learns")
    critic_from: Literal["actor", "reward"] = Field(
        "actor", description="role whose model the critic starts from, unless --critic.model names one"
    )
    bootstrap_truncated: bool = Field(
        False, description="use the value after the last token as future reward of completions that were cut off"
    )


class PPO:
    Options = Options

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    def needs(self) -> Needs:
        options = self.options
        critic = RoleNeed("critic", head="scalar", trainable=True, source=options.critic_from, lr=1e-5)
        outputs = [Output("values"), Output("values", role="critic")]
        if options.bootstrap_truncated:
            outputs.append(Output("bootstrap", role="critic"))
        return F.policy_needs(options, idle_steps=options.critic_warmup, roles=(critic,), outputs=outputs)

    @hookimpl
    def compute_advantages(self, experience: Experience) -> Advantages:
        """Computes GAE over action tokens of ``r_it = token_reward + shaped``; returns ``G = A + V_old``, ``A`` before
        whitening.

        With ``lam_critic``, ``G`` has its own lambda (VAPO, arXiv:2504.05118, section 4.1).
        """
        options, mask = self.options, experience.action_mask
        values = experience.values["critic"]
        rewards = experience.token_rewards if experience.shaped is None else experience.token_rewards + experience.shaped
        bootstrap = None
        if options.bootstrap_truncated:
            bootstrap = experience.bootstrap["critic"].where(experience.truncated, 0.0)
        advantages = F.gae(rewards, values, mask, options.gamma, options.lam, bootstrap)
        target = advantages
        if options.lam_critic is not None:
            target = F.gae(rewards, values, mask, options.gamma, options.lam_critic, bootstrap)
        values = values.where(mask, 0.0)
        returns = target + values
        metrics = _critic_metrics(values, returns, experience.loss_mask)
        if options.whiten != "none":
            advantages = F.whiten(advantages, experience.loss_mask, center_only=options.whiten == "center")
        return Advantages(advantages, returns, metrics)

    @hookimpl
    def compute_loss(self, role: str, outputs: Outputs, batch: Batch) -> list[LossTerm | Metric]:
        if role == "critic":
            return _value_loss(outputs, batch, self.options.value_clip)
        return F.policy_loss(outputs, batch, self.options) if role == "actor" else []


def _value_loss(outputs: Outputs, batch: Batch, clip: float | None) -> list[LossTerm | Metric]:
    """Returns the value term of a micro-batch, on the same tokens as the policy's terms."""
    if outputs.values is None or batch.returns is None:
        raise ValueError("the value loss needs outputs.values and batch.returns")
    mask, old = batch.loss_mask, batch.values["critic"]
    loss = F.value_loss(outputs.values, old, batch.returns, mask, clip)
    cut = loss > F.value_loss(outputs.values, old, batch.returns, mask, None)
    return [LossTerm("value", loss), Metric("clip_fraction", cut.float(), mask)]


def _critic_metrics(values: Tensor, returns: Tensor, mask: Tensor) -> list[Metric]:
    """Returns means, and explained variance ``1 − Var(G − V) / Var(G)``, which is left out if all returns are the same."""
    metrics = [Metric("critic/value", values, mask), Metric("critic/return", returns, mask)]
    if mask.any() and (spread := float(returns[mask].var(correction=0))) > 1e-8:
        error = float((returns - values)[mask].var(correction=0))
        metrics.append(Metric("critic/explained_variance", 1 - error / spread))
    return metrics
