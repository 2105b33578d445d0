"""Advantages by hand, and what MaxRL says of rewards below 0."""

import logging
import math

import pytest
import torch
from rlhf_authoring import make_batch

from rlhf_host.installed import build, find


def first_tokens(algo, lengths, rewards):
    batch = make_batch(lengths, groups=[0] * len(lengths), rewards=rewards)
    advantages = algo.compute_advantages(batch).advantages
    return [float(row[mask][0]) for row, mask in zip(advantages, batch.action_mask, strict=True)]


@pytest.mark.parametrize(
    ("name", "lengths", "rewards", "expected"),
    [
        ("maxrl", [2, 1, 1, 3], [1.0, 0.0, 0.0, 0.0], [3.0, -1.0, -1.0, -1.0]),
        ("maxrl", [2, 1], [0.0, 0.0], [0.0, 0.0]),
        ("opo", [1, 2, 3], [1.0, 0.0, 0.0], [5 / 6, -1 / 6, -1 / 6]),
    ],
)
def test_advantages_by_hand(name, lengths, rewards, expected):
    assert first_tokens(build(find("algo", name), {}), lengths, rewards) == pytest.approx(expected)


def of_rows(name):
    """Advantages of two groups: rows with observations, episodes of several rows, a KL that is placed in the reward."""
    batch = make_batch([8, 3, 5, 2, 6, 1], groups=[0, 0, 0, 0, 1, 1], rewards=[1.0, 1.0, 0.0, 0.5, 1.0, 0.0], observations=True)
    batch.episode_id = torch.tensor([0, 0, 1, 2, 3, 4])
    random = torch.Generator().manual_seed(1)
    batch.shaped = torch.where(batch.action_mask, 0.1 * torch.randn(batch.action_mask.shape, generator=random), 0.0)
    totals = [float(r) + float(s.double().sum()) for r, s in zip(batch.rewards, batch.shaped, strict=True)]
    advantages = build(find("algo", name), {}).compute_advantages(batch).advantages
    episodes: dict[int, list[int]] = {}
    for row, episode in enumerate(batch.episode_id.tolist()):
        episodes.setdefault(episode, []).append(row)
    groups = [[rows for rows in episodes.values() if int(batch.group_id[rows[0]]) == group] for group in (0, 1)]
    return batch, totals, groups, [float(row[mask][0]) for row, mask in zip(advantages, batch.action_mask, strict=True)]


def mean(values):
    return math.fsum(values) / len(values)


def test_opos_baseline_is_a_mean_over_episodes_by_their_action_tokens():
    """``Σ|y|·R / Σ|y|`` (arXiv:2505.23585, eq. 7): an episode has the action tokens of all its rows, and one reward."""
    batch, totals, groups, found = of_rows("opo")
    for group in groups:
        lengths = [sum(int(batch.action_mask[row].sum()) for row in rows) for rows in group]
        rewards = [mean([totals[row] for row in rows]) for rows in group]
        baseline = math.fsum(length * reward for length, reward in zip(lengths, rewards, strict=True)) / sum(lengths)
        for row in (row for rows in group for row in rows):
            assert found[row] == pytest.approx(totals[row] - baseline, rel=1e-5)


def test_maxrl_divides_by_the_mean_of_what_the_rewards_gave():
    """``(R̃ − mean R̃) / mean R``: the KL is in the numerator alone (arXiv:2602.02710, algorithm 1)."""
    batch, totals, groups, found = of_rows("maxrl")
    for group in groups:
        centre = mean([mean([totals[row] for row in rows]) for rows in group])
        success = mean([mean([float(batch.rewards[row]) for row in rows]) for rows in group])
        for row in (row for rows in group for row in rows):
            assert found[row] == pytest.approx((totals[row] - centre) / success, rel=1e-5)


def test_maxrl_warns_once_of_rewards_below_0(caplog):
    algo = build(find("algo", "maxrl"), {})
    with caplog.at_level(logging.WARNING):
        first_tokens(algo, [1, 1], [1.0, 0.0])
        assert not caplog.messages
        for _ in range(2):
            first_tokens(algo, [1, 1], [-1.0, 1.0])
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("maxrl: a reward is -1: ")
