"""Grouped and masked statistics against float64 loops."""

import pytest
import torch

from rlhf_host import functional as F


def loop_leave_one_out(rewards, groups):
    result = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        others = [r for j, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and j != i]
        result.append(reward - sum(others) / len(others) if others else 0.0)
    return result


def test_leave_one_out_matches_a_loop_for_unequal_scattered_groups():
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(40, generator=generator, dtype=torch.float64)
    groups = torch.randint(0, 7, (40,), generator=generator)
    expected = loop_leave_one_out(rewards.tolist(), groups.tolist())
    assert F.leave_one_out(rewards, groups).tolist() == pytest.approx(expected, abs=1e-12)


def test_hand_worked_group():
    found = F.leave_one_out(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([5, 5, 5, 5]))
    assert found.tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


@pytest.mark.parametrize("reward", [0.1, 1e6, -1e6, 0.0])
def test_zero_variance_is_exactly_zero(reward):
    assert F.leave_one_out(torch.full((8,), reward), torch.zeros(8, dtype=torch.int64)).eq(0).all()


def test_a_group_of_one_is_exactly_zero():
    found = F.leave_one_out(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0, 1, 1]))
    assert found.tolist() == [0.0, -1.0, 1.0]


def test_huge_rewards_stay_finite_and_centred():
    found = F.leave_one_out(torch.tensor([1e6, -1e6, 1e6]), torch.zeros(3, dtype=torch.int64))
    assert found.sum().abs() < 1e-6
    assert found.tolist() == pytest.approx([1e6, -2e6, 1e6])


def test_permuting_rows_permutes_the_result():
    rewards = torch.tensor([1.0, 2.0, 4.0, 0.5, 0.25])
    groups = torch.tensor([0, 1, 0, 1, 1])
    order = torch.tensor([3, 0, 4, 2, 1])
    assert torch.equal(F.leave_one_out(rewards, groups)[order], F.leave_one_out(rewards[order], groups[order]))


def test_an_episode_with_several_trajectories_counts_once():
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0])  # three rows of one episode, one of another
    groups, episodes = torch.zeros(4, dtype=torch.int64), torch.tensor([7, 7, 7, 9])
    assert F.group_mean(rewards, groups, episodes).tolist() == [0.5] * 4
    assert F.leave_one_out(rewards, groups, episodes).tolist() == [1.0, 1.0, 1.0, -1.0]
    assert F.group_sizes(groups, episodes).tolist() == [2] * 4


def test_masked_means_ignore_nan_and_empty_rows():
    values = torch.tensor([[1.0, float("nan"), 3.0], [float("nan")] * 3])
    mask = torch.tensor([[True, False, True], [False] * 3])
    assert F.masked_mean(values, mask, -1).tolist() == [2.0, 0.0]
    assert F.masked_sum(values, mask).item() == 4.0


def test_suffix_sum_runs_over_action_tokens_only():
    values = torch.tensor([[1.0, 100.0, 2.0, 4.0]])
    mask = torch.tensor([[True, False, True, True]])
    assert F.suffix_sum(values, mask).tolist() == [[7.0, 0.0, 6.0, 4.0]]
