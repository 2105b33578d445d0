"""Online DPO: the best and the worst of several answers to a prompt are a preference pair (arXiv:2402.04792)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlhf_rows import losses

from rlhf_host import (
    Batch,
    Drop,
    Experience,
    Group,
    LossTerm,
    Metric,
    Needs,
    Outputs,
    RunError,
    Trajectory,
    UserError,
    hookimpl,
)

EQUAL = 1e-6
"""Rewards that differ by less, relative to the largest from 1 on, are equal."""
ALL_EQUAL = (
    "no pair is left in this batch: answers whose rewards differ have equal ones after the extensions that change rewards, such as"
    " by a limit; widen it, or leave the extension out"
)


class OnlineDPO:
    """Online DPO: the best of several answers to a prompt must be likelier than the worst, compared with the reference."""

    Options = losses.PreferenceOptions

    def __init__(self, options: losses.PreferenceOptions):
        self.options = options

    @hookimpl
    def needs(self) -> Needs:
        pairs = losses.preference_needs(self.options, lr=1e-6)
        return replace(pairs, data="prompts", rewards=True, min_group_size=2, weights=None)

    @hookimpl
    def keep_group(self, group: Group) -> bool | Drop:
        return True if best_and_worst(group) else Drop("equal_rewards")

    @hookimpl
    def make_rows(self, groups: Sequence[Group]) -> list[Trajectory]:
        """Returns the best and the worst answer of each group, as the chosen and the rejected row of a pair; none of a
        group whose answers are equal. Raises ``RunError`` if there is no pair.
        """
        rows = []
        for group in groups:
            for place, (row, label) in enumerate(zip(best_and_worst(group), (1.0, 0.0), strict=False)):
                columns = {**row.columns, "label": label}
                rows.append(replace(row, episode_id=group.group_id, row=place, parent=None, columns=columns))
        if not rows:
            raise RunError(ALL_EQUAL)
        return rows

    @hookimpl
    def prepare_batch(self, experience: Experience) -> dict[str, Any]:
        return losses.prepared_pairs(experience, self.options)

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> list[LossTerm | Metric]:
        return losses.preference_loss(outputs, batch, self.options)


def best_and_worst(group: Group) -> tuple[Trajectory, ...]:
    """Returns two answers, the earlier samples if several are equal; none if all rewards are equal.

    Raises ``UserError`` if an episode has several trajectories.
    """
    rows = [(row.reward, row) for row in group.trajectories if row.reward is not None]
    if len({row.episode_id for _, row in rows}) < len(rows):
        raise UserError("a pair is two answers of one trajectory each, and this agent's episodes have several: choose another")
    if not rows:
        return ()
    (_, best), (_, worst) = max(rows, key=lambda item: item[0]), min(rows, key=lambda item: item[0])
    return (best, worst) if differ(best, worst) else ()


def differ(one: Trajectory, other: Trajectory) -> bool:
    """Returns True if the rewards of two answers are not equal, but for rounding."""
    assert one.reward is not None
    assert other.reward is not None
    return abs(one.reward - other.reward) > EQUAL * max(1.0, abs(one.reward), abs(other.reward))
