"""Grouped and masked statistics against float64 loops."""

import statistics

import pytest
import torch
from rlhf_authoring.tensors import make_batch

from rlhf_host import functional as F

NAN = float("nan")


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


def loop_group_normalize(rewards, groups, std, eps):
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        mine = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        scale = {"none": 1.0, "batch": statistics.stdev(rewards) + eps}.get(std)
        if scale is None:
            scale = statistics.stdev(mine) + eps if len(mine) > 1 else 1.0
        result.append((reward - statistics.fmean(mine)) / scale)
    return result


@pytest.mark.parametrize("std", ["group", "batch", "none"])
@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_group_normalize_matches_a_loop_for_unequal_scattered_groups(std, eps):
    generator = torch.Generator().manual_seed(2)
    rewards = torch.randn(40, generator=generator, dtype=torch.float64)
    groups = torch.randint(0, 9, (40,), generator=generator)
    groups[0] = 100  # a group of one
    found = F.group_normalize(rewards, groups, std=std, eps=eps)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(loop_group_normalize(rewards.tolist(), groups.tolist(), std, eps), abs=1e-12)
    assert found[0] == 0.0


@pytest.mark.parametrize(
    ("std", "scales"),
    [("none", [1.0, 1.0]), ("group", [2**0.5, 8**0.5]), ("batch", [(19 / 3) ** 0.5] * 2)],
)
def test_group_normalize_hand_worked(std, scales):
    """Groups 2, 0 and 6, 2: means 1 and 4, deviations √2 and 2√2; all four have mean 2.5 and squared deviations 19 over 3."""
    found = F.group_normalize(torch.tensor([2.0, 0.0, 6.0, 2.0]), torch.tensor([0, 0, 1, 1]), std=std, eps=0.0)
    assert found.tolist() == pytest.approx([1 / scales[0], -1 / scales[0], 2 / scales[1], -2 / scales[1]])


@pytest.mark.parametrize("std", ["group", "batch", "none"])
@pytest.mark.parametrize("eps", [1e-6, 0.0])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1e6, -1e6])
def test_zero_variance_normalizes_to_exactly_zero(std, reward, eps):
    """Eight rewards of 0.1 in float32 have a mean that is not 0.1; one of them is off by less than the rule's tolerance."""
    groups = torch.tensor([0] * 8 + [1, 1])
    nearly = torch.full((8,), reward, dtype=torch.float64)
    nearly[3] += 9e-7 * max(1.0, abs(reward))
    for same in (torch.full((8,), reward), nearly):
        found = F.group_normalize(torch.cat([same, torch.tensor([1.0, -1.0])]), groups, std=std, eps=eps)
        assert found[:8].eq(0).all()
        assert found[8] > 0 > found[9]


@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_a_batch_without_any_variance_normalizes_to_zero(std):
    assert F.group_normalize(torch.full((4,), 0.1), torch.zeros(4, dtype=torch.int64), std=std).eq(0).all()
    assert F.group_normalize(torch.tensor([3.0]), torch.tensor([0]), std=std, eps=0.0).eq(0).all()


def test_huge_rewards_normalize_as_small_ones_do():
    groups = torch.zeros(3, dtype=torch.int64)
    small = F.group_normalize(torch.tensor([1.0, -1.0, 1.0]), groups, eps=0.0)
    assert torch.allclose(F.group_normalize(torch.tensor([1e6, -1e6, 1e6]), groups, eps=0.0), small, rtol=1e-12)


def test_normalizing_counts_an_episode_with_several_trajectories_once():
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0])
    groups, episodes = torch.zeros(4, dtype=torch.int64), torch.tensor([7, 7, 7, 9])
    expected = [0.5, 0.5, 0.5, -0.5]
    assert F.group_normalize(rewards, groups, episodes, std="none").tolist() == expected
    for std in ("group", "batch"):  # the unbiased deviation of 1 and 0 is √½
        found = F.group_normalize(rewards, groups, episodes, std=std, eps=0.0)
        assert found.tolist() == pytest.approx([x * 2**0.5 for x in expected])


@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_permuting_and_renaming_groups_changes_nothing(std):
    rewards = torch.tensor([1.0, 2.0, 4.0, 0.5, 0.25, 3.0])
    groups = torch.tensor([0, 1, 0, 1, 1, 2])
    order = torch.tensor([3, 0, 5, 4, 2, 1])
    expected = F.group_normalize(rewards, groups, std=std)
    assert torch.allclose(F.group_normalize(rewards[order], 50 - groups[order], std=std), expected[order], rtol=1e-12)


def test_an_unknown_std_is_refused_with_the_list():
    with pytest.raises(ValueError, match="group, batch or none"):
        F.group_normalize(torch.zeros(2), torch.zeros(2, dtype=torch.int64), std="std")


def test_turn_advantages_hand_worked():
    """Turn rewards 1, 2 | 0, 4 | 5 give returns-to-go 3, 2 | 4, 4 | 5: the first turn's mean is 4, the second's is 3 over the
    two that have it. A trajectory alone in its group has nothing to compare with, and a third turn alone neither."""
    turns = torch.tensor([[0, 0, -1, 1, -1, -1], [0, -1, 1, 1, -1, 2], [0, 0, -1, -1, -1, -1], [0, 1, -1, -1, -1, -1]])
    rewards = torch.tensor(
        [[0.0, 1.0, NAN, 2.0, NAN, NAN], [0.0, NAN, 3.0, 1.0, NAN, 0.0], [5.0, 0.0] + [NAN] * 4, [7.0, 7.0] + [NAN] * 4]
    )
    found = F.turn_advantages(rewards, turns, turns >= 0, torch.tensor([4, 4, 4, 2]))
    assert found.tolist() == [
        [-1.0, -1.0, 0.0, -1.0, 0.0, 0.0],
        [0.0, 0.0, 1.0, 1.0, 0.0, 0.0],
        [1.0, 1.0, 0.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    ]


def test_turns_that_all_end_alike_give_exactly_zero():
    batch = make_batch([7] * 8, groups=[0] * 8, rewards=[0.1] * 8, observations=True)
    assert F.turn_advantages(batch.token_rewards, batch.turn_ids, batch.action_mask, batch.group_id).eq(0).all()


def loop_turn_advantages(rewards, turns, mask, groups, episodes):
    """Per token: the return-to-go from its turn, less the mean over the group's episodes that have the turn."""
    to_go = []
    for row_rewards, row_turns, row_mask in zip(rewards, turns, mask, strict=True):
        seen = sorted({turn for turn, acts in zip(row_turns, row_mask, strict=True) if acts})
        tokens = list(zip(row_rewards, row_turns, row_mask, strict=True))
        to_go.append({k: sum(r for r, turn, acts in tokens if acts and turn >= k) for k in seen})
    result = [[0.0] * len(row) for row in turns]
    for i, row in enumerate(turns):
        for t, turn in enumerate(row):
            if mask[i][t]:
                having = {}
                for j, other in enumerate(to_go):
                    if groups[j] == groups[i] and turn in other:
                        having.setdefault(episodes[j], []).append(other[turn])
                result[i][t] = to_go[i][turn] - statistics.fmean(statistics.fmean(x) for x in having.values())
    return result


@pytest.mark.parametrize("shared_episodes", [False, True])
def test_turn_advantages_match_a_loop(shared_episodes):
    batch = make_batch([11, 4, 8, 2, 7, 11, 5, 1], groups=[0, 1, 0, 1, 1, 0, 2, 1], observations=True, seed=8)
    rewards = torch.randn(batch.action_mask.shape, generator=torch.Generator().manual_seed(8))
    episodes = torch.tensor([0, 1, 0, 3, 3, 5, 6, 7]) if shared_episodes else None
    found = F.turn_advantages(
        torch.where(batch.action_mask, rewards, NAN), batch.turn_ids, batch.action_mask, batch.group_id, episodes
    )
    expected = loop_turn_advantages(
        rewards.tolist(),
        batch.turn_ids.tolist(),
        batch.action_mask.tolist(),
        batch.group_id.tolist(),
        list(range(8)) if episodes is None else episodes.tolist(),
    )
    assert found.dtype == torch.float32
    for row, wanted in zip(found.tolist(), expected, strict=True):
        assert row == pytest.approx(wanted, abs=1e-6)
    order = [4, 0, 7, 2, 6, 1, 5, 3]
    permuted = F.turn_advantages(
        rewards[order],
        batch.turn_ids[order],
        batch.action_mask[order],
        batch.group_id[order],
        None if episodes is None else episodes[order],
    )
    assert torch.allclose(permuted, found[order], atol=1e-6)


def test_only_rows_with_siblings_stay():
    batch = make_batch([4, 3, 2, 5, 5], groups=[3, 3, 8, 9, 9], observations=True)
    batch.episode_id = torch.tensor([0, 1, 2, 3, 3])  # group 9 is one episode of two trajectories
    found = F.with_siblings(batch)
    assert torch.equal(found[:2], batch.action_mask[:2])
    assert not found[2:].any()
    assert torch.equal(F.with_siblings(batch, least=1), batch.action_mask)
    assert not F.with_siblings(batch, least=3).any()
