"""Checks of saved steps that are trained on or scored again: weights of rewards, groups, tokens that the model has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rlhf_host import Group, Trajectory, UserError
from rlhf_host.internals import AGENT
from rlhf_host.models import sizes
from rlhf_host.sampling import unpack_tokens

if TYPE_CHECKING:
    from rlhf_host.sampling import SavedStep
    from rlhf_host.settings import RoleConfig


def judged_groups(step: SavedStep) -> list[Group]:
    """Returns the judged trajectories by group, in file order."""
    groups: dict[str, Group] = {}
    for row in step.rows:
        if row.reward is not None:
            groups.setdefault(row.group_id, Group(row.group_id, row.task, [])).trajectories.append(row)
    return list(groups.values())


def reward_weights(step: SavedStep, configured: Mapping[str, float]) -> dict[str, float]:
    """Returns the weight of every reward in these rows: the file's, else the configured one, else 1 if rewards have one.
    Raises ``UserError`` if no weight is known, or the file and the configuration disagree.
    """
    names = list(dict.fromkeys(name for row in step.rows for name in row.rewards if name != AGENT))
    weights = {**configured, **step.weights}
    again = "; rlhf replay scores a file again: --reward NAME --output SCORED.jsonl"
    for name, weight in configured.items():
        if name not in names:
            raise UserError(f"{step.where}: scored by {', '.join(names) or 'no plugin'}, not by {name}{again}")
        if step.weights.get(name, weight) != weight:
            raise UserError(f"{step.where}: {name} was weighted {step.weights[name]:g}, and now {weight:g}{again}")
    unknown = [name for name in names if name not in weights]
    if unknown and all(map(_is_plain_sum, step.rows)):
        return dict.fromkeys(names, 1.0)
    if unknown:
        raise UserError(
            f"{step.where}: nothing says how the rewards {', '.join(unknown)} were weighted: "
            f"give --reward and --reward.NAME.weight as in the run that made the file"
        )
    return {name: weights[name] for name in names}


def _is_plain_sum(row: Trajectory) -> bool:
    return row.reward is None or math.isclose(row.reward, sum(reward.total for reward in row.rewards.values() if reward))


def check_vocabulary(steps: Iterable[SavedStep], actor: RoleConfig) -> None:
    """Raises ``UserError`` for a token outside the model's vocabulary, also in a set of those that could be drawn, if its size is
    known.
    """
    size, _ = sizes(actor)
    for step in steps if size is not None else ():
        sampled = max((max(s.token_ids, default=0) for row in step.rows for s in row.segments), default=0)
        sets = (unpack_tokens(one) for row in step.rows for one in filter(None, row.traces.get("support", ())))
        highest = max(sampled, max((int(ids[-1]) for ids in sets), default=0))
        if highest >= (size or 0):
            raise UserError(
                f"{step.where}: step {step.step} has the token {highest}, and the model a vocabulary of {size}: "
                "give the model that they were sampled from"
            )
