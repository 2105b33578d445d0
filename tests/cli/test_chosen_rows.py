"""Algorithms that train on the best of several sampled answers, on the real command line and in several processes."""

from __future__ import annotations

import json

import pytest
from transformers import AutoModelForCausalLM

ALGORITHMS = ["raft", "online_dpo"]
MACHINE = ("time/", "memory/", "engine/", "sync/", "tokens_per_s", "tflops", "mfu")


@pytest.fixture
def flags(small_run):
    """``flags(algo, ...)``: a command with the reward ``vowels``."""
    return lambda algo, *more: ["train", "--algo", algo, *small_run[3:], *more]


def curve(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(MACHINE)} for row in rows]


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_the_reward_rises_without_advantages(algo, rlhf_here, flags, tmp_path):
    result = rlhf_here(*flags(algo, "--train.steps", "20", "--actor.lr", "1e-2", "--run-dir", tmp_path / "run"))
    assert result.exit_code == 0, result.output
    rows = curve(tmp_path / "run")
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3]), rewards
    for row in rows:
        assert row["rows/count"] == (4 if algo == "raft" else 8)
        assert row["rows/groups_left_out"] == 0
        assert algo == "online_dpo" or row["rows/reward"] >= row["reward/mean"]
        assert not any(name.startswith("advantages/") for name in row)
        assert row["mismatch/max"] < 1e-4


def test_ties_are_dropped_counted_and_drawn_again(rlhf_here, flags, tmp_path):
    result = rlhf_here(*flags("online_dpo", "--rollout.n", "2", "--train.steps", "6", "--run-dir", tmp_path / "run"))
    assert result.exit_code == 0, result.output
    rows = curve(tmp_path / "run")
    ties = sum(row.get("rollout/dropped/equal_rewards", 0) for row in rows)
    assert ties > 0
    assert sum(row["rollout/drawn"] for row in rows) == 4 * 6 + ties
    assert all(row["rows/count"] == 8 for row in rows)


def test_a_limit_on_the_reward_drops_prompts_without_a_good_answer(rlhf_here, flags, tmp_path):
    more = ("--algo.keep", "4", "--algo.min-reward", "0.25", "--train.steps", "3", "--run-dir", tmp_path / "run")
    result = rlhf_here(*flags("raft", *more))
    assert result.exit_code == 0, result.output
    rows = curve(tmp_path / "run")
    assert sum(row.get("rollout/dropped/below_min_reward", 0) for row in rows) > 0
    assert all(row["rows/reward"] >= 0.25 and 4 <= row["rows/count"] < 16 for row in rows)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_resumed_run_is_the_run_that_never_stopped(algo, rlhf_here, flags, tmp_path):
    more = ("--kl.coef", "0.05", "--train.epochs", "2", "--train.minibatches", "2")
    whole = rlhf_here(*flags(algo, *more, "--train.steps", "5", "--run-dir", tmp_path / "whole"))
    assert whole.exit_code == 0, whole.output
    assert rlhf_here(*flags(algo, *more, "--train.steps", "3", "--run-dir", tmp_path / "cut")).exit_code == 0
    assert rlhf_here("train", "--resume", tmp_path / "cut", "--train.steps", "5").exit_code == 0
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")


@pytest.mark.parametrize(("algo", "placement"), [("raft", "actor=2"), ("online_dpo", "actor+reference=2")])
def test_two_ranks_under_ray_train_as_one_process_does(algo, placement, rlhf, flags, tmp_path):
    common = flags(algo, "--train.steps", "3")
    rlhf.run(*common, "--run-dir", tmp_path / "alone")
    there = ("--runtime", "ray", "--ray.num-cpus", "4", "--ray.num-gpus", "0", "--ray.object-store-mb", "200")
    rlhf.run(*common, *there, "--placement", placement, "--placement", "rollout=1", "--run-dir", tmp_path / "together")
    alone, together = curve(tmp_path / "alone"), curve(tmp_path / "together")
    assert len(alone) == len(together) == 3
    for here, over in zip(alone, together, strict=True):
        for name in ("loss", "grad_norm", "reward/mean", "rows/reward", "rows/count"):
            assert over[name] == pytest.approx(here[name], abs=1e-5), name
    weights = [AutoModelForCausalLM.from_pretrained(tmp_path / run / "model").state_dict() for run in ("alone", "together")]
    for name, tensor in weights[0].items():
        assert (tensor - weights[1][name]).abs().max() < 1e-4, name


def test_saved_answers_are_chosen_from_too(rlhf_here, small_run, flags, tmp_path):
    sampled = rlhf_here("rollout", *small_run[3:], "--train.steps", "2", "--output", tmp_path / "saved.jsonl")
    assert sampled.exit_code == 0, sampled.output
    result = rlhf_here(*flags("raft", "--from-trajectories", tmp_path / "saved.jsonl", "--run-dir", tmp_path / "run"))
    assert result.exit_code == 0, result.output
    assert all(row["rows/reward"] >= row["reward/mean"] for row in curve(tmp_path / "run"))


@pytest.mark.parametrize(
    ("algo", "more", "message"),
    [
        ("raft", ("--algo.keep", "4"), "algo:raft needs groups of 5 or more, and rollout.n is 4: set --rollout.n 5"),
        ("raft", ("--algo.keep", "0"), "keep"),
        ("raft", ("--with", "tis"), "extension:tis gives importance_weights, and the loss of algo:raft takes none"),
        ("raft", ("--data.condition", "{prompt} {reward}"), "data.condition is for answers that come with a reward"),
        ("online_dpo", ("--rollout.n", "1"), "algo:online_dpo needs groups of 2 or more"),
        ("online_dpo", ("--algo.loss", "hinge", "--algo.label-smoothing", "0.1"), "loss hinge has no label_smoothing"),
    ],
)
def test_what_cannot_work_is_refused(algo, more, message, rlhf_here, flags, tmp_path):
    result = rlhf_here(*flags(algo, *more, "--run-dir", tmp_path / "run"))
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "run").exists()
