"""Penalties on the reward of long answers against OpenRLHF."""

from types import SimpleNamespace

import pytest
from rlhf_plugin_dapo import OverlongPenalty, StopProperly


def test_the_overlong_penalty_is_openrlhfs(make_case, openrlhf):
    case = make_case((3, 10, 12, 14, 15, 16), rewards=[1.0, 0.0, 0.5, -1.0, 1.0, 0.25])
    batch = case.batch
    batch.max_new_tokens = 16
    penalty = OverlongPenalty(OverlongPenalty.Options(buffer=5, factor=0.7))
    mine = penalty.transform_rewards(batch, batch.rewards)
    theirs = SimpleNamespace(rewards=batch.rewards.clone(), response_length=case.mask.sum(-1))
    openrlhf.length_penalty.apply_overlong_penalty([theirs], 16, 5, 0.7)
    assert mine.tolist() == pytest.approx(theirs.rewards.tolist())
    assert (mine != batch.rewards).tolist() == [False, False, True, True, True, True]


def test_stop_properly_leaves_negative_rewards_but_openrlhf_scales_them_towards_zero(make_case, openrlhf):
    case = make_case((3, 3, 3), (0, 0, 0), rewards=[1.0, 1.0, -1.0])
    case.batch.truncated[1:] = True
    mine = StopProperly(StopProperly.Options(coef=0.5)).transform_rewards(case.batch, case.batch.rewards)
    theirs = SimpleNamespace(rewards=case.batch.rewards.clone(), truncated=case.batch.truncated)
    openrlhf.length_penalty.apply_stop_properly_penalty([theirs], 0.5)
    assert theirs.rewards.tolist() == [1.0, 0.5, -0.5]
    assert mine.tolist() == [1.0, 0.5, -1.0]
