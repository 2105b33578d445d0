"""Rows from ``make_rows``, which are trained on in place of drawn or sampled rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlhf_host.errors import RunError
from rlhf_host.functional.statistics import masked_sum
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.records.episodes import Group, Trajectory
from rlhf_host.records.tensors import Experience


def chosen_rows(groups: Sequence[Group], experience: Experience, manager: PluginManager) -> list[Group]:
    """Returns the rows that ``make_rows`` makes from sampled groups. The hook sees the reward that an advantage would be
    computed from.

    Args:
        experience: the groups as tensors, rewards transformed and shaped.
    """
    totals = experience.rewards
    if experience.shaped is not None:
        totals = totals + masked_sum(experience.shaped, experience.action_mask, -1)
    rewards = iter(totals.tolist())
    judged = [
        replace(group, trajectories=[replace(row, reward=next(rewards)) for row in group.trajectories]) for group in groups
    ]
    return made_rows(judged, manager)


def made_rows(groups: Sequence[Group], manager: PluginManager) -> list[Group]:
    """Returns the rows that the run's ``make_rows`` makes from the groups; see ``regrouped``."""
    (key,) = manager.names("make_rows")
    return regrouped(manager.call(key, "make_rows", groups=groups), groups, key)


def regrouped(rows: Sequence[Trajectory], groups: Sequence[Group], key: str) -> list[Group]:
    """Checks and returns the rows that the plugin ``key`` made from the groups. Raises ``RunError`` for rows of other groups,
    and if there are none.
    """
    known = {group.group_id: Group(group.group_id, group.task, []) for group in groups}
    for row in rows:
        if row.group_id not in known:
            raise RunError(f"{key} gave a row of the group {row.group_id!r} from make_rows, which it was not given")
        known[row.group_id].trajectories.append(row)
    if not rows:
        raise RunError(f"{key} gave no rows from make_rows: give one or more, each of one of the groups")
    return [group for group in known.values() if group.trajectories]
