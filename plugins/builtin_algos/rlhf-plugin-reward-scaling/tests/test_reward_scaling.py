"""Means and deviations against numpy's, limits, single rewards, resumes, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from rlhf_authoring import make_batch
from rlhf_authoring.learner import SUMS, Learner
from rlhf_plugin_reward_scaling import RewardScaling

import rlhf_host
from rlhf_host import RunError, UserError


def longer(text):
    return float(len(text))


def numbers(text):
    return 10.0 * sum(text.count(digit) for digit in "13579")


def train(run, **more):
    fixed = {"train.threads": 1, "actor.model": "quickstart", "rollout.max_new_tokens": 4, "n": 4, "batch_size": 4, "steps": 3}
    asked = {"algo": Learner(), "reward": [longer, numbers], "data": SUMS, "lr": 1e-3, **fixed, **more}
    return rlhf_host.train(run_dir=str(run), **asked)


def curve(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def scaled(options, *batches):
    """The rewards that come out of batches that follow each other."""
    plugin, found = RewardScaling(RewardScaling.Options(**options)), []
    for values in batches:
        batch = make_batch([2] * len(values), rewards=list(values))
        found.append(plugin.transform_rewards(batch, batch.rewards.clone()).tolist())
    return found


ONE, TWO = (3.0, -1.0, 4.0, 1.5), (-5.0, 9.0, 2.0)


def test_a_running_mean_is_that_of_all_rewards_so_far():
    first, second = scaled({"normalize": "running"}, ONE, TWO)
    assert first == pytest.approx((np.array(ONE) - np.mean(ONE)) / np.std(ONE), rel=1e-6)
    assert second == pytest.approx((np.array(TWO) - np.mean(ONE + TWO)) / np.std(ONE + TWO), rel=1e-6)


@pytest.mark.parametrize("normalize", ["running", "batch"])
@pytest.mark.parametrize("reward", [None, "made_up"])
def test_an_episode_counts_once_however_many_rows_it_has(normalize, reward):
    rewards, once = [3.0, 3.0, 3.0, -1.0, 4.0, 4.0], np.array([3.0, -1.0, 4.0])
    batch = make_batch([2] * 6, rewards=rewards)
    batch.episode_id = torch.tensor([0, 0, 0, 1, 2, 2])
    plugin = RewardScaling(RewardScaling.Options(normalize=normalize, reward=reward))
    found = plugin.transform_rewards(batch, batch.rewards.clone())
    assert found.tolist() == pytest.approx((np.array(rewards) - once.mean()) / once.std(), rel=1e-6)
    assert plugin.count == (3 if normalize == "running" else 0)


def test_a_batch_has_a_mean_of_its_own():
    for found, values in zip(scaled({"normalize": "batch"}, ONE, TWO), (ONE, TWO), strict=True):
        assert found == pytest.approx((np.array(values) - np.mean(values)) / np.std(values), rel=1e-6)


def test_rewards_that_are_all_the_same_become_zero():
    assert scaled({"normalize": "batch"}, (2.0, 2.0)) == [[0.0, 0.0]]
    assert scaled({"normalize": "running"}, (2.0, 2.0)) == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"low": -1.0, "high": 2.0}, [2.0, -1.0, 2.0, 1.5]),
        ({"high": 2.0}, [2.0, -1.0, 2.0, 1.5]),
        ({"low": 0.0}, [3.0, 0.0, 4.0, 1.5]),
        ({"normalize": "batch", "high": 0.5}, [0.5, -1.5266, 0.5, -0.1991]),
    ],
)
def test_limits_come_after_the_mean(options, expected):
    assert scaled(options, ONE) == [pytest.approx(expected, abs=1e-4)]


def test_one_reward_changes_and_the_others_stay():
    """``w·(clip(x) − x)`` is added; rows without the reward are no part of its mean."""
    plugin = RewardScaling(RewardScaling.Options(normalize="running", high=1.0, reward="b"))
    values = torch.tensor([[1.0, 10.0], [2.0, float("nan")], [3.0, 30.0]])
    batch = dataclasses.replace(
        make_batch([2, 2, 2], rewards=[21.0, 2.0, 63.0]),
        plugin_rewards=values,
        reward_names=("a", "b"),
        reward_weights=(1.0, 2.0),
    )
    assert plugin.transform_rewards(batch, batch.rewards.clone()).tolist() == [1.0 + 2 * -1.0, 2.0, 3.0 + 2 * 1.0]
    assert (plugin.count, plugin.mean) == (2, 20.0)


def test_a_reward_that_nobody_gives_is_told_with_those_there_are():
    plugin = RewardScaling(RewardScaling.Options(high=1.0, reward="math"))
    batch = make_batch([2, 2], rewards=[1.0, 2.0])
    with pytest.raises(RunError, match=f"reward_scaling.reward is math, and the rewards are {', '.join(batch.reward_names)}"):
        plugin.transform_rewards(batch, batch.rewards)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "without them rewards stay as they are"),
        ({"low": 1.0, "high": 1.0}, "low 1 has to be below high 1"),
        ({"high": float("nan")}, "finite number"),
        ({"normalize": "group"}, "'none', 'running' or 'batch'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, said):
    with pytest.raises(ValidationError, match=said):
        RewardScaling.Options(**options)


def test_a_run_refuses_them_before_it_begins(tmp_path):
    with pytest.raises(UserError, match="without them rewards stay as they are"):
        train(tmp_path / "run", extensions=["reward_scaling"])
    assert not (tmp_path / "run").exists()


def test_a_run_that_resumes_is_the_run_that_did_not_stop(tmp_path):
    options = {"extensions": ["reward_scaling"], "reward_scaling.normalize": "running", "reward_scaling.high": 1.5}
    train(tmp_path / "whole", steps=4, **options)
    train(tmp_path / "run", steps=2, **options)
    rlhf_host.train(resume=str(tmp_path / "run"), algo=Learner(), reward=[longer, numbers], data=SUMS, steps=4)
    names = ("reward/longer", "reward/numbers", "loss", "grad_norm", "advantages/std")
    one, two = ([{name: row[name] for name in names} for row in curve(tmp_path / run)] for run in ("whole", "run"))
    assert one == two
    train(tmp_path / "plain", steps=1)
    assert curve(tmp_path / "plain")[0]["reward/numbers"] == one[0]["reward/numbers"], "what the plugin gave is shown"
    assert curve(tmp_path / "plain")[0]["advantages/std"] != one[0]["advantages/std"]
