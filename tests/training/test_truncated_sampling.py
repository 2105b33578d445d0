"""Runs whose sampling is truncated, through the real command line: ratios are of the distribution that tokens were drawn from."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rlhf_host import Segment, Step, hookimpl
from rlhf_host.records.token_sets import unpack_tokens
from rlhf_host.training.saved_rows import read_steps

WAYS = {"top-p": ("--rollout.top-p", "0.9"), "top-k": ("--rollout.top-k", "8"), "min-p": ("--rollout.min-p", "0.8")}
WHOLE = ("--trajectories.tokens", "--trajectories.max-per-step", "0")
TIMES = ("time/", "memory/", "engine/", "sync/", "tokens_per_s", "tflops", "mfu", "rollout/")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def train(rlhf_here, small_run, tmp_path):
    """Run in this process; gives the rows of metrics.jsonl and what was printed."""

    def run(name, *flags, code=0):
        where = () if "--resume" in flags else (*small_run, "--run-dir", tmp_path / name)
        result = rlhf_here(*(where or ["train"]), *flags)
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        path = tmp_path / name / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return rows, result.output

    return run


def learned(rows):
    return [{name: value for name, value in row.items() if not name.startswith(TIMES)} for row in rows]


@pytest.mark.parametrize("way", WAYS)
def test_the_trainer_has_the_samplers_log_probabilities(train, way):
    """Of the policy and of the reference: before the first update the divergence is 0, though both are cut off."""
    more = ("--kl.coef", "0.01", "--kl.place", "loss", "--train.epochs", "2", "--rollout.temperature", "0.7")
    rows, _ = train("run", *WAYS[way], *more, "--train.steps", "2")
    for row in rows:
        assert row["mismatch/max"] < 1e-5
        assert row["grad_norm"] > 0
        assert 1 < row["support/size"] < 60
        assert 0 <= row["support/single"] < 0.5
        assert 3 <= row["support/bytes"] <= 9
        assert row["entropy"] < np.log(60)
    assert abs(rows[0]["kl"]) < 1e-6 < rows[1]["kl/k3"]


def test_the_whole_softmax_would_be_another_distribution(train, tmp_path):
    """What the runs above avoid: the same tokens without what could be drawn are far from the sampler's distribution."""
    train("run", *WAYS["top-p"], *WHOLE, "--train.steps", "1")
    path = tmp_path / "run/trajectories/train-step-000001.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    stripped = "".join(json.dumps(row | {"traces": {}, "sampling": row["sampling"] | {"top_p": 1.0}}) + "\n" for row in rows)
    (tmp_path / "stripped.jsonl").write_text(stripped)
    (row,), _ = train("naive", "--from-trajectories", "stripped.jsonl")
    assert row["mismatch/mean"] > 0.05


def test_saved_samples_train_as_they_were_sampled_and_not_without_their_sets(train, rlhf_here, small_run, tmp_path):
    flags = (*WAYS["top-p"], "--rollout.top-k", "20", "--train.minibatches", "2")
    sampled, _ = train("sampled", *flags, *WHOLE, "--train.steps", "2")
    read, _ = train("read", *flags, "--from-trajectories", "sampled", "--train.steps", "2")
    assert learned(read) == learned(sampled)
    rolled = rlhf_here("rollout", *small_run[3:], *flags[:4], "--output", "rollouts.jsonl")
    assert rolled.exit_code == 0, rolled.output
    (step,) = read_steps(tmp_path / "rollouts.jsonl")
    (first, *_) = step.rows
    sets = [unpack_tokens(one) for one in first.traces["support"][len(first.prompt_ids) - 1 :]]
    assert all(token in own and len(own) <= 20 for token, own in zip(first.completion[0].token_ids, sets, strict=True))
    again, _ = train("again", *flags, "--from-trajectories", "rollouts.jsonl")
    assert again[0]["mismatch/max"] < 1e-5

    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    (tmp_path / "without.jsonl").write_text("".join(json.dumps(line | {"traces": {}}) + "\n" for line in lines))
    _, said = train("without", *flags, "--from-trajectories", "without.jsonl", code=2)
    assert "was sampled with top_p, top_k or min_p, and the tokens that could be drawn are not known" in said
    assert not (tmp_path / "without").exists()
    _, said = train("other", "--from-trajectories", "rollouts.jsonl", code=2)
    assert "sampled with top_p 0.9, and rollout.top_p is 1: set --rollout.top-p 0.9" in said


def test_a_resumed_run_is_the_run_that_never_stopped(train):
    flags = (*WAYS["top-k"], "--checkpoint.every", "1")
    whole, _ = train("whole", *flags, "--train.steps", "3")
    train("half", *flags, "--train.steps", "2")
    resumed, _ = train("half", "--resume", "half", "--train.steps", "3")
    assert learned(resumed) == learned(whole)


def test_tokens_of_older_weights_keep_the_sets_of_these(train):
    rows, _ = train("run", *WAYS["top-p"], "--async-depth", "1", "--pipeline.schedule", "fixed", "--train.steps", "3")
    assert rows[0]["mismatch/max"] < 1e-5
    assert rows[2]["staleness/max"] == 1
    assert 1e-4 < rows[2]["ratio/max_log"] < 0.5, "the ratio to the sampler is that of the weights, over the same tokens"


class Again:
    """Three turns; the environment's words stand between them."""

    @hookimpl
    def agent_reset(self, episode):
        return Step()

    @hookimpl
    def agent_step(self, episode, action):
        episode.state = (episode.state or 0) + 1
        return Step(observation="go on: ", done=episode.state == 3)


def test_agents_of_several_turns(tiny_model, prompts, tmp_path):
    import rlhf_host

    settings = {"rollout.top_p": 0.9, "rollout.max_new_tokens": 6, "train.steps": 2, "train.batch_size": 4, "n": 4}
    more = {"trajectories.tokens": True, "kernels": "none", "train.threads": 1, "actor.lr": 1e-3}
    run = rlhf_host.train(
        algo="rloo", rewards=length, agent=Again(), model=tiny_model, data=prompts, run_dir=tmp_path / "run", **settings, **more
    )
    assert max(row["mismatch/max"] for row in run.metrics) < 1e-5
    (step, *_) = read_steps(run.run_dir)
    for row in step.rows:
        assert [segment.kind for segment in row.completion].count("action") == 3
        told = row.traces["support"][len(row.prompt_ids) - 1 :]
        actions = [segment.kind == "action" for segment in row.completion for _ in segment.token_ids]
        assert [bool(one) for one in told] == actions


def length(text, label):
    return len(text) / 10


class Writer:
    """Makes its rows itself, without what the engine told."""

    @hookimpl
    async def agent_run(self, episode, policy):
        answer = await policy.generate(episode.task.prompt_ids)
        (row,) = policy.trajectories()
        row.segments = [*row.segments[:1], Segment("action", answer.token_ids, answer.logprobs, answer.versions)]
        row.traces = {}
        return [row]


def test_rows_without_their_sets_end_the_run_by_name(tiny_model, prompts, tmp_path):
    import rlhf_host

    settings = {"rollout.min_p": 0.2, "rollout.max_new_tokens": 4, "train.steps": 1, "kernels": "none", "n": 2, "batch_size": 2}
    given = {"rewards": length, "agent": Writer(), "model": tiny_model, "data": prompts, "run_dir": tmp_path / "run"}
    with pytest.raises(rlhf_host.UserError, match="rows that an agent makes or changes itself"):
        rlhf_host.train(algo="rloo", **given, **settings)
