"""GDPO against the paper's example and a float64 loop."""

import statistics

import pytest
import torch
from rlhf_authoring.tensors import make_batch
from rlhf_plugin_grpo import GDPO, GRPO


def advantages(batch, algorithm=GDPO, **options):
    return algorithm(algorithm.Options(**options)).compute_advantages(batch).advantages


def with_rewards(batch, columns, weights):
    """The batch with these rewards per plugin, and their weighted sum."""
    batch.plugin_rewards = torch.tensor(columns, dtype=torch.float32).T
    batch.reward_weights = tuple(weights)
    batch.reward_names = tuple(f"r{k}" for k in range(len(weights)))
    counted = [k for k, weight in enumerate(weights) if weight != 0]
    totals = [
        sum(weights[k] * (columns[k][i] if columns[k][i] == columns[k][i] else 0.0) for k in counted) for i in range(len(batch))
    ]
    batch.rewards = torch.tensor(totals, dtype=torch.float32)
    return batch


def normalised(values, members, eps):
    """``values`` of ``members``, minus their mean, over their standard deviation; 0 for the rest and without variance."""
    chosen = [values[i] for i in members]
    mean, std = sum(chosen) / len(chosen), statistics.stdev(chosen) if len(chosen) > 1 else 0.0
    return {i: (values[i] - mean) / (std + eps) if std > 1e-6 else 0.0 for i in members}


def by_loop(batch, eps=1e-6):
    """The formula for episodes of one trajectory each."""
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(batch.group_id.tolist()):
        groups.setdefault(group, []).append(row)
    columns = [(w, batch.plugin_rewards[:, k].tolist()) for k, w in enumerate(batch.reward_weights) if w != 0]
    sums = [sum(weight * values[i] for weight, values in columns) for i in range(len(batch))]
    columns.append((1.0, [reward - total for reward, total in zip(batch.rewards.tolist(), sums, strict=True)]))
    kl = [0.0] * len(batch)
    if batch.shaped is not None:
        kl = [float(row[mask].double().sum()) for row, mask in zip(batch.shaped, batch.action_mask, strict=True)]
    total = [0.0] * len(batch)
    for members in groups.values():
        for i in members:
            total[i] = kl[i] - sum(kl[j] for j in members) / len(members)
        for weight, values in columns:
            for i, value in normalised(values, members, eps).items():
                total[i] += weight * value
    compared = [i for members in groups.values() if len(members) > 1 for i in members]
    found = normalised(total, compared, eps)
    return [found.get(i, 0.0) for i in range(len(batch))]


def test_the_papers_example_where_grpo_sees_no_difference():
    # Section 2 and 3.1: of two binary rewards, rollout 2 of the first task earns one, of the second task both.
    batch = make_batch([1, 1, 1, 1], groups=[0, 0, 1, 1])
    with_rewards(batch, [[0, 1, 0, 1], [0, 0, 0, 1]], [1.0, 1.0])
    assert advantages(batch, GRPO)[:, 0].tolist() == pytest.approx([-0.7071, 0.7071, -0.7071, 0.7071], abs=1e-4)
    # Sums of normalised rewards: ∓0.7071 and ∓1.4142; over the batch: mean 0, variance (2·0.5 + 2·2)/3.
    expected = [sign * value / (5 / 3) ** 0.5 for value in (0.5**0.5, 2**0.5) for sign in (-1, 1)]
    assert advantages(batch)[:, 0].tolist() == pytest.approx(expected, rel=1e-5)


def rich_batch():
    """Three rewards of very different scales, one logged only and NaN; a penalty from a transform; KL; a group of one."""
    batch = make_batch([3, 5, 2, 4, 6, 1, 3, 2], groups=[0, 1, 0, 1, 0, 2, 1, 1], observations=True)
    columns = [[1, 0, 0, 1, 1, 1, 0, 0], [0.01, 0.03, 0.02, 0.05, 0.01, 0.02, 0.03, 0.04], [float("nan")] * 8]
    with_rewards(batch, columns, [1.0, -0.5, 0.0])
    batch.rewards = batch.rewards - torch.tensor([0.0, 0.2, 0.0, 0.0, 0.4, 0.0, 0.0, 0.1])
    batch.shaped = 0.1 * torch.randn(batch.action_mask.shape, generator=torch.Generator().manual_seed(2))
    return batch


@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_agrees_with_a_float64_loop(eps):
    batch = rich_batch()
    expected = torch.tensor(by_loop(batch, eps)).unsqueeze(-1) * batch.action_mask
    torch.testing.assert_close(advantages(batch, std_eps=eps), expected, rtol=1e-5, atol=1e-6)


def test_weights_act_on_normalised_rewards_and_scales_do_not():
    columns = [[1, 0, 0, 1], [5, 5, 9, 2]]
    batch = with_rewards(make_batch([1] * 4, groups=[0] * 4), columns, [1.0, 2.0])
    scaled = with_rewards(make_batch([1] * 4, groups=[0] * 4), [columns[0], [1000 * x for x in columns[1]]], [1.0, 2.0])
    torch.testing.assert_close(advantages(batch), advantages(scaled), rtol=1e-5, atol=1e-6)
    other = with_rewards(make_batch([1] * 4, groups=[0] * 4), columns, [1.0, 0.5])
    assert (advantages(batch) - advantages(other)).abs().max() > 0.1


def test_the_batch_is_normalised_over_episodes_that_have_siblings():
    batch = rich_batch()
    found = [advantages(batch)[row][batch.action_mask[row]][0].item() for row in (0, 1, 2, 3, 4, 6, 7)]
    assert sum(found) == pytest.approx(0.0, abs=1e-5)
    assert statistics.stdev(found) == pytest.approx(1.0, rel=1e-4)


def test_an_episodes_trajectories_count_once():
    alone = with_rewards(make_batch([2, 2, 2], groups=[0, 0, 0]), [[1, 0, 0], [0, 3, 1]], [1.0, 1.0])
    split = with_rewards(make_batch([2] * 4, groups=[0] * 4), [[1, 0, 0, 0], [0, 3, 1, 1]], [1.0, 1.0])
    split.episode_id = torch.tensor([0, 1, 2, 2])
    torch.testing.assert_close(advantages(split)[:3], advantages(alone))
    assert torch.equal(advantages(split)[3], advantages(split)[2])


def test_a_penalty_of_a_transform_is_not_lost():
    batch = with_rewards(make_batch([1] * 4, groups=[0] * 4), [[1, 1, 0, 0]], [1.0])
    assert advantages(batch)[0, 0] == advantages(batch)[1, 0]
    batch.rewards = batch.rewards - torch.tensor([0.0, 0.5, 0.0, 0.0])
    assert advantages(batch)[0, 0] > advantages(batch)[1, 0] + 0.5


def test_the_rounding_of_large_totals_is_no_penalty():
    columns = [[1e6 + 0.3, 1e6 + 0.7, -1e6, 1e6 + 0.1], [0.123, 0.456, 0.789, 0.321]]
    batch = with_rewards(make_batch([1] * 4, groups=[0] * 4), columns, [0.7, 0.3])
    values = [batch.plugin_rewards[:, k].tolist() for k in range(2)]
    parts = [normalised(column, range(4), 1e-6) for column in values]
    expected = normalised([0.7 * parts[0][i] + 0.3 * parts[1][i] for i in range(4)], range(4), 1e-6)
    assert advantages(batch)[:, 0].tolist() == pytest.approx([expected[i] for i in range(4)], rel=1e-5)


def test_the_coefficient_of_the_kl_matters():
    batch = rich_batch()
    small = advantages(batch)
    batch.shaped = 10 * batch.shaped
    assert (advantages(batch) - small).abs().max() > 0.1


def test_a_reward_missing_from_a_row_counts_zero_as_in_the_total():
    columns = [[1, 0, 0, 1], [float("nan"), 2.0, 1.0, float("nan")]]
    found = advantages(with_rewards(make_batch([1] * 4, groups=[0] * 4), columns, [1.0, 1.0]))
    filled = advantages(with_rewards(make_batch([1] * 4, groups=[0] * 4), [columns[0], [0.0, 2.0, 1.0, 0.0]], [1.0, 1.0]))
    assert torch.equal(found, filled)
