"""Advantages by hand, and what MaxRL says of rewards below 0."""

import logging

import pytest
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


def test_maxrl_warns_once_of_rewards_below_0(caplog):
    algo = build(find("algo", "maxrl"), {})
    with caplog.at_level(logging.WARNING):
        first_tokens(algo, [1, 1], [1.0, 0.0])
        assert not caplog.messages
        for _ in range(2):
            first_tokens(algo, [1, 1], [-1.0, 1.0])
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("maxrl: a reward is -1: ")
