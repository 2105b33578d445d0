"""Algorithms that compare the policy's answers with those of another model: XPO (arXiv:2405.21046), Nash-MD (arXiv:2312.00886).

Of a prompt's ``n`` answers, those with even numbers are the policy's and those with odd numbers the other's, its *rival*: answer
``2k + 1`` is compared with answer ``2k``. The agents ``xpo`` and ``nash_md`` sample them so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from rlhf_rows import losses

from rlhf_host import (
    AlgoNeeds,
    Batch,
    Drop,
    Episode,
    Experience,
    Group,
    LossTerm,
    Metric,
    Needs,
    Output,
    Outputs,
    Policy,
    RoleNeed,
    RunError,
    Segment,
    Trajectory,
    UserError,
    hookimpl,
)
from rlhf_plugin_online_dpo import ALL_EQUAL, differ

if TYPE_CHECKING:
    from torch import Tensor

RIVAL = "reference"
"""Role of the other model."""


class BesideReference:
    """The agent of XPO: one question, one answer; every second answer of a prompt is the reference's."""

    mixture: float | None = None

    @hookimpl
    def needs(self) -> Needs:
        return Needs(roles=(RoleNeed(RIVAL, source="actor", generates=True, mixes=self.mixture),))

    @hookimpl
    async def agent_run(self, episode: Episode, policy: Policy) -> list[Trajectory]:
        """Samples one answer. Evaluations have the policy's answers alone."""
        prompt = episode.task.prompt_ids or ()
        if episode.split == "eval" or self.is_own(episode.sample):
            await policy.generate(prompt)
            return policy.trajectories()
        answer = await policy.role(RIVAL).generate(prompt)
        action = Segment("action", answer.token_ids, answer.logprobs, answer.versions)
        segments = [Segment("prompt", prompt, images=episode.task.images), action]
        ids = episode.episode_id, episode.group_id
        return [Trajectory(*ids, episode.task, segments, answer.finish_reason, sample=episode.sample)]

    def is_own(self, sample: int) -> bool:
        """Returns True for the answers of a prompt that are the policy's."""
        return sample % 2 == 0


class MixtureOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    mixture: float = Field(0.5, gt=0, lt=1, description="share of the reference in the mixture: β of the paper")


class BesideMixture(BesideReference):
    """The agent of Nash-MD: every second answer of a prompt comes from the mixture of policy and reference.

    ``π_mix ∝ π^(1 − β)·ref^β``, token by token (arXiv:2312.00886, the alternative policy of Nash-MD-PG).
    """

    Options = MixtureOptions

    def __init__(self, options: MixtureOptions):
        self.mixture = options.mixture


def check_agent(config: Mapping[str, Any], agent: str, whose: str) -> None:
    """Raises ``UserError`` for a run without the agent that samples the other model's answers."""
    if config.get("from_trajectories") is None and config["agent"]["name"] != agent:
        raise UserError(f"{whose}, which the agent {agent} samples: add --agent {agent}")


def check_rivals(config: Mapping[str, Any], agent: str) -> None:
    """Raises ``UserError`` for a run without the agent that samples the other model's answers, or with an odd ``rollout.n``."""
    check_agent(config, agent, "every second answer is another model's")
    if (n := config["rollout"]["n"]) % 2:
        raise UserError(f"half of a prompt's answers are another model's, and rollout.n is {n}: take an even number")


def rivals(group: Group) -> Iterator[tuple[int, Trajectory, Trajectory]]:
    """Yields the number of each pair with two rewards, the policy's answer and the other model's."""
    rows = {row.sample: row for row in group.trajectories if row.reward is not None}
    for sample, row in sorted(rows.items()):
        if sample % 2 == 0 and sample + 1 in rows:
            yield sample // 2, row, rows[sample + 1]


def given(row: Trajectory) -> Trajectory:
    """Returns the row as one of a data set: the policy did not sample its tokens, so no mismatch with it is measured."""
    plain = [replace(segment, logprobs=None, versions=None) for segment in row.segments]
    return replace(row, segments=plain)


# --- XPO ----------------------------------------------------------------------------------------------


class XPOOptions(losses.PreferenceOptions):
    loss: Literal["sigmoid", "ipo_sum"] = Field("sigmoid", description="preference loss: sigmoid as in DPO, or ipo_sum")
    reference_free: bool = Field(False, description="always false: the reference answers too")
    alpha: float = Field(
        1e-5, ge=0, description="weight of the log-likelihood of the reference's answers, which the policy is to leave"
    )

    @field_validator("reference_free")
    @classmethod
    def _has_one(cls, value: bool) -> bool:
        if value:
            raise ValueError("the reference of XPO answers too: leave reference_free out, or take online_dpo")
        return value


class XPO:
    """XPO: online DPO on an answer of the policy and one of the reference, and a bonus for leaving the latter.

    ``−log σ(βh) + α·log π(y_ref)``, a mean over pairs: ``h`` as in DPO, ``y_ref`` the reference's answer (arXiv:2405.21046,
    algorithm 1).
    """

    Options = XPOOptions

    def __init__(self, options: XPOOptions):
        self.options = options

    @hookimpl
    def needs(self) -> Needs:
        pairs = losses.preference_needs(self.options, lr=1e-6)
        return replace(pairs, data="prompts", rewards=True, min_group_size=2, weights=None)

    @hookimpl
    def check_run(self, config: Mapping[str, Any]) -> None:
        check_rivals(config, "xpo")

    @hookimpl
    def keep_group(self, group: Group) -> bool | Drop:
        return True if any(differ(*pair) for _, *pair in rivals(group)) else Drop("equal_rewards")

    @hookimpl
    def make_rows(self, groups: Sequence[Group]) -> list[Trajectory]:
        """Returns two rows for each pair whose rewards differ: the policy's answer and the reference's, one of them chosen.

        Raises ``RunError`` if there is no such pair.
        """
        made = []
        for group in groups:
            for number, own, other in rivals(group):
                if not differ(own, other):
                    continue
                better = own.reward > other.reward  # type: ignore[operator]
                for row, label, rival in ((own, better, 0.0), (given(other), not better, 1.0)):
                    columns = {**row.columns, "label": float(label), "rival": rival}
                    common = {"episode_id": f"{group.group_id}/{number}", "row": int(rival), "parent": None}
                    made.append(replace(row, columns=columns, **common))
        if not made:
            raise RunError(ALL_EQUAL)
        return made

    @hookimpl
    def prepare_batch(self, experience: Experience) -> dict[str, Any]:
        return losses.prepared_pairs(experience, self.options)

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> list[LossTerm | Metric]:
        items = losses.preference_loss(outputs, batch, self.options)
        chosen, rejected = losses.pairs(batch)
        sums = logprobs_of_rows(outputs, batch)
        of_rival = batch.columns["rival"] == 1
        likely = sums[chosen].where(of_rival[chosen], sums[rejected])
        items.append(LossTerm("exploration", losses.on_rows(likely, chosen, rejected), coefficient=self.options.alpha))
        return [*items, Metric("wins", (~of_rival[chosen]).float())]


def logprobs_of_rows(outputs: Outputs, batch: Batch) -> Tensor:
    """Returns ``[B]``: the log-probability of each row's trained tokens. Raises ``ValueError`` without log-probabilities."""
    if outputs.logprobs is None:
        raise ValueError("a loss of answers needs outputs.logprobs")
    return outputs.logprobs.where(batch.loss_mask, 0.0).sum(-1)


def regression_needs() -> AlgoNeeds:
    """Returns what losses on the policy's own answers need that use its log-ratio to the other model."""
    actor = RoleNeed("actor", trainable=True, source=None, lr=1e-6)
    return AlgoNeeds(
        data="prompts",
        roles=(actor, RoleNeed(RIVAL, source="actor")),
        outputs=(Output("logprobs", RIVAL),),
        min_group_size=2,
        weights=None,
        ratio=False,
    )


# --- Nash-MD ------------------------------------------------------------------------------------------


class NashOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    beta: float = Field(0.1, ge=0, description="weight of the KL from the reference: τ of the paper")
    preference: Literal["sigmoid", "order"] = Field(
        "sigmoid", description="probability that an answer is preferred: the sigmoid of the rewards' difference, or 1, ½ and 0"
    )
    kl: Literal["sequence", "token"] = Field(
        "sequence", description="log-ratio to the reference in the signal of a token: the whole answer's, or the token's own"
    )


class NashMD:
    """Nash-MD: the policy's answers must be preferred to those of the mixture of policy and reference.

    The gradient is that of ``−sg(P − ½ − β·log(π/ref))·log π`` of the policy's answer, a mean over answers: ``P`` the probability
    that it is preferred to the answer of the mixture (arXiv:2312.00886, Nash-MD-PG).
    """

    Options = NashOptions

    def __init__(self, options: NashOptions):
        self.options = options

    @hookimpl
    def needs(self) -> Needs:
        return regression_needs()

    @hookimpl
    def check_run(self, config: Mapping[str, Any]) -> None:
        check_rivals(config, "nash_md")

    @hookimpl
    def keep_group(self, group: Group) -> bool | Drop:
        return True if any(rivals(group)) else Drop("no_pair")

    @hookimpl
    def make_rows(self, groups: Sequence[Group]) -> list[Trajectory]:
        """Returns the policy's answer of each pair, with the probability that it is preferred."""
        return [
            replace(own, columns={**own.columns, "preferred": self._preferred(own, other)})
            for group in groups
            for _, own, other in rivals(group)
        ]

    def _preferred(self, own: Trajectory, other: Trajectory) -> float:
        from math import tanh

        assert own.reward is not None
        assert other.reward is not None
        if self.options.preference == "sigmoid":
            return 0.5 * (1.0 + tanh((own.reward - other.reward) / 2))
        return float(own.reward > other.reward) if differ(own, other) else 0.5

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> list[LossTerm | Metric]:
        sums, preferred = logprobs_of_rows(outputs, batch), batch.columns["preferred"]
        assert outputs.logprobs is not None
        mask, beta = batch.loss_mask, self.options.beta
        ratios = (outputs.logprobs.detach() - batch.logprobs[RIVAL]).where(mask, 0.0)
        kl = ratios.sum(-1)
        if self.options.kl == "sequence":
            penalty = kl * sums
        else:
            penalty = (ratios * outputs.logprobs.where(mask, 0.0)).sum(-1)
        items: list[LossTerm | Metric] = [
            LossTerm("preference", -(preferred - 0.5) * sums),
            LossTerm("kl", penalty, coefficient=beta),
        ]
        return [*items, Metric("preferred", preferred), Metric("kl_reference", kl)]
