"""Sampling that runs ahead of training: what is trained, how old it may be, and that a resumed run uses every task once."""

from __future__ import annotations

import json
import signal
import tempfile
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

STEPS = 10


@pytest.fixture(scope="module")
def flags(tiny_model, prompts):
    model = ("train", "--algo", "rloo", "--reward", "vowels", "--actor.model", tiny_model, "--data", prompts)
    small = ("--rollout.n", "4", "--rollout.max-new-tokens", "8", "--train.batch-size", "4", "--train.threads", "1")
    log = ("--trajectories.max-per-step", "0", "--trajectories.tokens", "--checkpoint.every", "2", "--train.steps", STEPS)
    return [*model, *small, *map(str, log), "--kernels", "none", "--actor.lr", "1e-3"]


def rows_of(run):
    """Step → its row of metrics."""
    return {row["step"]: row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}


def tasks_of(run):
    """Step → the tasks that it trained on, in order."""
    found = {}
    for file in sorted((run / "trajectories").glob("*.jsonl")):
        rows = [row for row in map(json.loads, file.read_text().splitlines()) if row.get("split", "train") == "train"]
        for row in rows:
            found.setdefault(row["step"], {}).setdefault(row["group_id"], row["prompt"])
    return {step: list(groups.values()) for step, groups in found.items()}


@pytest.fixture(scope="module")
def synchronous(rlhf, flags, tmp_path_factory):
    run = tmp_path_factory.mktemp("synchronous") / "run"
    rlhf.run(*flags, "--run-dir", run)
    return tasks_of(run)


@pytest.mark.parametrize("depth", [1, 3])
def test_the_batches_are_those_of_a_synchronous_run_and_no_older_than_the_depth(rlhf, flags, synchronous, tmp_path, depth):
    run = tmp_path / "run"
    rlhf.run(*flags, "--run-dir", run, "--async-depth", str(depth), "--train.minibatches", "2")
    assert tasks_of(run) == synchronous
    rows = rows_of(run)
    assert len(rows) == STEPS
    ages = [rows[step]["staleness/max"] for step in range(1, STEPS + 1)]
    assert ages[0] == 0.0
    assert max(ages) == depth
    for row in rows.values():
        fresh = row["staleness/max"] == 0.0
        assert ("mismatch/max" in row) == fresh, "older tokens were sampled by other weights"
        assert not fresh or row["mismatch/max"] < 1e-5
    assert any(row["kl/update"] > 0 for row in rows.values())


@pytest.fixture
def short():
    """A directory with a name that leaves room for sockets."""
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as made:
        yield made


ON_RAY = ("--runtime", "ray", "--ray.num-cpus", "4", "--ray.num-gpus", "0", "--ray.object-store-mb", "200")


@pytest.mark.parametrize("place", ["local", "ray"])
@pytest.mark.timeout(300)
def test_every_token_was_sampled_by_the_version_that_it_says(rlhf, flags, synchronous, tiny_model, tmp_path, short, place):
    """Log-probabilities again, by the checkpoint of that version."""
    if place == "ray":
        pytest.importorskip("ray")
    run, where = tmp_path / "run", (*ON_RAY, "--ray.temp-dir", short, "--placement", "rollout=2") if place == "ray" else ()
    rlhf.run(*flags, "--run-dir", run, "--async-depth", "2", "--checkpoint.every", "1", "--checkpoint.keep", "0", *where)
    assert tasks_of(run) == synchronous
    rows = [row for file in sorted((run / "trajectories").glob("train-*")) for row in map(json.loads, file.open())]
    assert {row["step"] - 1 - version for row in rows for version in row["segments"][1]["versions"]} == {0, 1, 2}
    for version in range(STEPS - 1):
        of_version = [row["segments"] for row in rows if set(row["segments"][1]["versions"]) == {version}]
        if not of_version:
            continue
        directory = run / f"checkpoints/step-{version:06d}/model" if version else tiny_model
        model = AutoModelForCausalLM.from_pretrained(directory)
        for prompt, action in of_version[:12]:
            ids, start = torch.tensor([[*prompt["token_ids"], *action["token_ids"]]]), len(prompt["token_ids"])
            with torch.no_grad():
                logprobs = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
            again = logprobs.gather(-1, ids[0, start:, None])[:, 0]
            assert (again - torch.tensor(action["logprobs"])).abs().max() < 1e-5
    assert all(len(set(row["segments"][1]["versions"])) == 1 for row in rows), "no request sees two versions"


def test_with_a_correction_the_ratio_is_the_trainer_s(rlhf, flags, tmp_path):
    run = tmp_path / "run"
    more = ("--with", "tis", "--train.old-logprobs", "fused", "--train.steps", "4")
    rlhf.run(*flags, "--run-dir", run, "--async-depth", "1", *more)
    rows = rows_of(run)
    assert rows[1]["correction/mean"] == pytest.approx(1.0, abs=1e-4)
    assert any(abs(row["correction/max"] - 1.0) > 1e-3 for row in rows.values()), "weights of another version"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_resumed_run_uses_every_task_once(rlhf_process, rlhf, flags, synchronous, tmp_path, number):
    run = tmp_path / "run"
    slow = ("--run-dir", run, "--async-depth", "2", "--rollout.max-new-tokens", "32")
    process = rlhf_process.start(*flags, *slow)
    until = time.monotonic() + 60
    while not (run / "checkpoints/step-000004").exists() and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -number), err
    assert "Traceback" not in err
    rlhf.run("train", "--resume", run)
    assert tasks_of(run) == synchronous
    assert sorted(rows_of(run)) == list(range(1, STEPS + 1))


def test_a_run_may_be_resumed_at_another_depth(rlhf, flags, synchronous, tmp_path):
    run = tmp_path / "run"
    rlhf.run(*flags, "--run-dir", run, "--async-depth", "3", "--train.steps", "4")
    rlhf.run("train", "--resume", run, "--async-depth", "0", "--train.steps", "7")
    rlhf.run("train", "--resume", run, "--async-depth", "1", "--train.steps", STEPS)
    assert tasks_of(run) == synchronous


def values(run):
    """The rows of ``metrics.jsonl`` without what measures this machine."""
    machine = ("time/", "memory/", "tokens_per_s")
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in row.items() if not key.startswith(machine)} for row in rows]


@pytest.fixture(scope="module")
def fixed(flags, prompts):
    """A run with updates of its weights, filters that drop, and evaluations."""
    more = ("--async-depth", "2", "--pipeline.schedule", "fixed", "--train.minibatches", "2", "--kl.coef", "0.05")
    return [*flags, *more, "--with", "dynamic_filtering", "--eval.data", prompts, "--eval.every", "3"]


def test_a_fixed_schedule_gives_the_same_values_again_also_after_kills(rlhf_process, rlhf, fixed, tmp_path):
    whole, again = tmp_path / "whole", tmp_path / "again"
    rlhf.run(*fixed, "--run-dir", whole)
    rows = values(whole)
    assert max(row["staleness/max"] for row in rows if row["step"]) == 2.0
    assert sum(row["rollout/dropped"] for row in rows if row["step"]) > 0
    assert any("eval/reward/mean" in row for row in rows)
    arguments = [*fixed, "--run-dir", again]
    for steps in (2, 4, 8):
        process = rlhf_process.start(*arguments)
        until = time.monotonic() + 60
        while not (again / f"checkpoints/step-{steps:06d}").exists() and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        arguments = ["train", "--resume", again]
    rlhf.run(*arguments)
    assert values(again) == rows
    assert (again / f"checkpoints/step-{STEPS - 2:06d}/pending.jsonl").exists()
    assert tasks_of(again) == tasks_of(whole)


STATEFUL = '''
from pydantic import BaseModel
from rlhf_host import hookimpl

class Counting:
    """Counts what it scored."""
    class Options(BaseModel):
        pass
    def __init__(self, options):
        self.seen = 0
    @hookimpl
    def score(self, trajectories):
        self.seen += len(trajectories)
        return [float(self.seen) for _ in trajectories]
    @hookimpl
    def state_dict(self):
        return {"seen": self.seen}
    @hookimpl
    def load_state_dict(self, state):
        self.seen = state["seen"]
'''


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--train.old-logprobs", "fused"], "with train.old_logprobs fused nothing corrects for the versions that sampled"),
        (["--train.old-logprobs", "recompute", "--train.epochs", "2"], "with train.old_logprobs recompute nothing corrects"),
        (["--with", "tis"], "extension:tis does not work with train.old_logprobs sampler"),
        (["--algo.loss", "gspo"], "algo:rloo does not work with train.old_logprobs sampler"),
        (["--reward", "counting"], "reward:counting has a state that its score changes beside the steps"),
    ],
)
def test_what_cannot_run_ahead_is_refused(site, tiny_model, prompts, more, reason):
    site.install("counting", {"rlhf.rewards": "counting = counting:Counting"}, {"counting.py": STATEFUL})
    reward = [] if "--reward" in more else ["--reward", "math_verifier"]
    flags = ["--algo", "rloo", *reward, "--actor.model", tiny_model, "--data", prompts, "--async-depth", "1"]
    done = site.rlhf("train", *flags, *more, "--dry-run")
    assert done.returncode == 2
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


def test_data_with_answers_is_refused(site, tiny_model, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "completion": "2"}\n')
    done = site.rlhf("train", "--algo", "sft", "--actor.model", tiny_model, "--data", rows, "--async-depth", "1", "--dry-run")
    assert done.returncode == 2
    assert "async_depth is 1, and nothing is sampled: leave --async-depth out" in done.stderr
