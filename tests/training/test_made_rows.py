"""Rows that ``make_rows`` gives in place of a batch's own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhf_host import Group, RunError, Segment, Task, Trajectory
from rlhf_host.training.made_rows import regrouped


def group(name: str, *episodes: str) -> Group:
    segments = [Segment("prompt", [1]), Segment("action", [2])]
    return Group(name, Task(""), [Trajectory(episode, name, Task(""), segments) for episode in episodes])


def test_rows_go_to_their_groups_in_the_order_of_the_groups():
    groups = [group("a", "1", "2"), group("b", "3")]
    (one, two), (three,) = (given.trajectories for given in groups)
    made = regrouped([three, replace(three, episode_id="4"), two, one], groups, "algo:x")
    assert [(each.group_id, [row.episode_id for row in each.trajectories]) for each in made] == [
        ("a", ["2", "1"]),
        ("b", ["3", "4"]),
    ]
    assert [len(given.trajectories) for given in groups] == [2, 1]


def test_a_group_without_rows_leaves_the_batch():
    groups = [group("a", "1"), group("b", "2")]
    assert [each.group_id for each in regrouped(groups[1].trajectories, groups, "algo:x")] == ["b"]


def test_a_row_of_no_group_is_an_error():
    with pytest.raises(RunError, match="algo:x gave a row of the group 'c' from make_rows"):
        regrouped(group("c", "1").trajectories, [group("a", "1")], "algo:x")


def test_no_rows_at_all_are_an_error():
    with pytest.raises(RunError, match="algo:x gave no rows from make_rows"):
        regrouped([], [group("a", "1")], "algo:x")
