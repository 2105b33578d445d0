"""Which trajectories tables of samples and saved files have: several groups, a right answer, and a wrong one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_host.trackers.records import spread

leading = partial(spread, first=True)


@dataclass
class Row:
    """What is asked of a trajectory."""

    place: int
    group_id: int
    reward: float | None


REWARDS = st.lists(st.sampled_from([None, float("nan"), 0.0, 0.5, 1.0]), max_size=40)


def rows_of(rewards, group=4):
    return [Row(place, place // group, reward) for place, reward in enumerate(rewards)]


def worth(rows):
    return {row.reward for row in rows if row.reward is not None and row.reward == row.reward}


@given(REWARDS, st.integers(2, 20), st.sampled_from([spread, leading]))
@settings(max_examples=100, deadline=None)
def test_the_highest_and_the_lowest_reward_are_among_them(rewards, count, choose):
    rows = rows_of(rewards)
    chosen = choose(rows, count)
    places = [row.place for row in chosen]
    assert places == sorted({*places}), "each once, in their order"
    assert len(chosen) == min(count, len(rows))
    if len(rows) > 1 and (all_of_them := worth(rows)):
        assert {min(all_of_them), max(all_of_them)} <= worth(chosen)


def test_where_the_usual_ones_have_them_nothing_else_is_chosen():
    rows = rows_of([0.0, 1.0, 1.0, 1.0] * 8)
    assert [row.place for row in spread(rows, 4)] == [0, 1, 8, 16], "of 0, 8, 16 and 24 none is right"
    assert [row.place for row in spread(rows_of([None] * 32), 4)] == [0, 8, 16, 24]
    assert [row.place for row in spread(rows, 1)] == [0]
    assert [row.place for row in leading(rows, 6)] == [0, 1, 2, 3, 4, 5]
    assert leading(rows, 0) == spread(rows, 0) == []


def test_a_wrong_answer_far_behind_is_saved_with_its_group():
    rows = rows_of([1.0] * 30 + [0.0] + [1.0] * 9)
    assert [row.place for row in leading(rows, 12)] == [*range(8), 28, 29, 30, 31]
    assert [row.place for row in spread(rows, 2)] == [0, 30]
