"""OTB: a baseline for each token, weighted by how far the tokens before it move the policy (arXiv:2602.07078)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from rlhf_host import Advantages, AlgoNeeds, Experience, Metric, Output, hookimpl
from rlhf_host import functional as F
from rlhf_plugin_group_methods.group import Estimator

if TYPE_CHECKING:
    from torch import Tensor


class OTBOptions(F.PolicyLossOptions):
    zero_tail: bool = Field(
        False,
        description="the tokens by which the longest answer of a group outlasts the others have no baseline; else each is its own"
        " and they learn nothing",
    )


class OTB(Estimator):
    """OTB: each token has the baseline of least variance, in which answers count by squared scores (arXiv:2602.07078)."""

    Options = OTBOptions
    options: OTBOptions

    @hookimpl
    def needs(self) -> AlgoNeeds:
        outputs = Output("logprobs", role="actor"), Output("collision", role="actor")
        return F.policy_needs(self.options, min_group_size=2, outputs=outputs)

    @hookimpl
    def compute_advantages(self, experience: Experience) -> Advantages:
        """Computes ``A_it = G_it − Σ_j G_jt·W_jt / Σ_j W_jt`` over the rows of the group with a ``t``-th action token: ``G`` is the
        reward to come, ``W_jt = Σ_{s≤t} (1 − 2·π_js + Σ_v π_jsv²)``, the squared norm of the score by the logits, summed. Where
        rewards of a group are all equal, advantages are 0.
        """
        import torch

        mask = experience.action_mask
        rewards = experience.token_rewards if experience.shaped is None else experience.token_rewards + experience.shaped
        returns = F.suffix_sum(rewards, mask)
        chances = torch.where(mask, experience.logprobs["actor"], 0.0).double().exp()
        energy = torch.where(mask, 1 - 2 * chances + experience.collision["actor"], 0.0).clamp(min=0.0)
        values = torch.zeros(mask.shape)
        differ = F.group_normalize(experience.rewards, experience.group_id, experience.episode_id, std="none") != 0
        for rows in rows_of_groups(experience.group_id):
            to_go, weights, there = (
                packed([of[row][mask[row]] for row in rows]) for of in (returns, energy, torch.ones(mask.shape))
            )
            above = above_baseline(to_go, weights.cumsum(1), there > 0, self.options.zero_tail and bool(differ[rows].any()))
            for row, own in zip(rows, above, strict=True):
                values[row, mask[row]] = own[: int(mask[row].sum())].float()
        return Advantages(values, metrics=[Metric("otb/energy", energy, mask)])


def rows_of_groups(group_id: Tensor) -> Iterator[list[int]]:
    """Yields the rows of each group."""
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(group_id.tolist()):
        groups.setdefault(group, []).append(row)
    yield from groups.values()


def packed(rows: list[Tensor]) -> Tensor:
    """Returns tensors of different lengths as one, ``[N, T]`` float64, with zeros behind them."""
    from torch.nn.utils.rnn import pad_sequence

    return pad_sequence([row.double() for row in rows], batch_first=True)


def above_baseline(to_go: Tensor, weights: Tensor, there: Tensor, zero_tail: bool) -> Tensor:
    """Returns ``[N, T]``: each value minus the weighted mean of those at its place.

    Args:
        weights: ``[N, T]``, not below 0; where all are 0 the mean is a plain one.
        there: ``[N, T]`` bool; other places are 0.
        zero_tail: a value that is alone at its place stays as it is, if there are several rows; else it is 0.
    """
    import torch

    count = there.sum(0)
    weights = torch.where(there, weights, 0.0)
    weights = torch.where(weights.sum(0) > 0, weights, there.double())
    least = torch.where(there, to_go, torch.inf).amin(0)  # relative to it, equal values cancel exactly
    over = torch.where(there, to_go - least, 0.0)
    mean = (weights * over).sum(0) / weights.sum(0).clamp(min=torch.finfo(torch.float64).tiny)
    above = torch.where(there, over - mean, 0.0)
    return torch.where(there & (count == 1), to_go, above) if zero_tail and len(there) > 1 else above
