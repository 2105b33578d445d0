"""Sampling that runs ahead of training: what is trained, how old it may be, and that a resumed run uses every task once."""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
import time

import pytest
import torch
from rlhf_authoring import write_tiny_model
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


def ledger_of(run):
    """Per step its draws, and what became of them."""
    rows = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    return {row["step"]: row["draws"] for row in rows}


@pytest.fixture(scope="module")
def synchronous(rlhf, flags, tmp_path_factory):
    run = tmp_path_factory.mktemp("synchronous") / "run"
    rlhf.run(*flags, "--run-dir", run)
    ledger = ledger_of(run)
    assert [draw[0] for draws in ledger.values() for draw in draws] == list(range(STEPS * 4))
    assert {outcome for draws in ledger.values() for *_, outcome in draws} == {"trained"}
    return tasks_of(run), ledger


@pytest.mark.parametrize("depth", [1, 3])
def test_the_batches_are_those_of_a_synchronous_run_and_no_older_than_the_depth(rlhf, flags, synchronous, tmp_path, depth):
    run = tmp_path / "run"
    rlhf.run(*flags, "--run-dir", run, "--async-depth", str(depth), "--train.minibatches", "2")
    assert (tasks_of(run), ledger_of(run)) == synchronous
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


@pytest.mark.parametrize("place", ["local", "ray", "vllm"])
@pytest.mark.timeout(300)
def test_every_token_was_sampled_by_the_version_that_it_says(rlhf, flags, synchronous, tiny_model, tmp_path, short, place):
    """Log-probabilities again, by the checkpoint of that version."""
    run, where = tmp_path / "run", ()
    if place in ("ray", "vllm"):
        pytest.importorskip("ray")
        where = (*ON_RAY, "--ray.temp-dir", short, "--placement", "rollout=1", "--rollout.max-new-tokens", "48")
    if place == "vllm":
        pytest.importorskip("vllm")
        wide = write_tiny_model(tmp_path / "wide", hidden=128)  # vLLM has no narrower heads
        where, flags = (*where, "--engine", "vllm"), [wide if flag == tiny_model else flag for flag in flags]
        tiny_model = wide
    rlhf.run(*flags, "--run-dir", run, "--async-depth", "2", "--checkpoint.every", "1", "--checkpoint.keep", "0", *where)
    assert (tasks_of(run), ledger_of(run)) == synchronous
    rows = [row for file in sorted((run / "trajectories").glob("train-*")) for row in map(json.loads, file.open())]
    assert {row["step"] - 1 - version for row in rows for version in row["segments"][1]["versions"]} == {0, 1, 2}
    models = {
        version: AutoModelForCausalLM.from_pretrained(run / f"checkpoints/step-{version:06d}/model" if version else tiny_model)
        for version in range(STEPS)
    }
    mixed = [row for row in rows if len(set(row["segments"][1]["versions"])) > 1]
    assert bool(mixed) == (place != "local"), "new weights come under requests where the engine has its own"
    assert any(row["staleness/mixed"] > 0 for row in rows_of(run).values()) == bool(mixed)
    for row in (*mixed[:60], *rows[::4]):
        prompt, action = row["segments"]
        ids, start = torch.tensor([[*prompt["token_ids"], *action["token_ids"]]]), len(prompt["token_ids"])
        versions = torch.tensor(action["versions"])
        assert (versions.diff() >= 0).all()
        for version in versions.unique().tolist():
            with torch.no_grad():
                logprobs = models[version](ids).logits[0, start - 1 : -1].log_softmax(-1)
            gaps = logprobs.gather(-1, ids[0, start:, None])[:, 0] - torch.tensor(action["logprobs"])
            assert gaps[versions == version].abs().max() < (1e-4 if place == "vllm" else 1e-5)


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
    assert (tasks_of(run), ledger_of(run)) == synchronous
    assert sorted(rows_of(run)) == list(range(1, STEPS + 1))


SLOW = """
import asyncio


async def vowels(text, prompt):
    await asyncio.sleep(0.5 * (int(prompt.split("+")[0]) % 5 == 0))
    return sum(letter in "aeiou" for letter in text) / 8
"""


def test_draws_that_take_long_are_passed_and_none_is_lost_when_the_run_is_killed(rlhf_process, rlhf, flags, tmp_path):
    run, reward = tmp_path / "run", tmp_path / "slow.py"
    reward.write_text(SLOW)
    flags = [f"{reward}:vowels" if flag == "vowels" else flag for flag in flags]
    process = rlhf_process.start(*flags, "--run-dir", run, "--async-depth", "1", "--pipeline.max-staleness", "3")
    until = time.monotonic() + 60
    while not (run / "checkpoints/step-000004").exists() and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    passed = json.loads((newest / "state.json").read_text())["stream"]["passed"]
    if passed:
        refused = rlhf.run("train", "--resume", run, "--pipeline.max-staleness", "null", code=2)
        assert "resume it with --async-depth 1 --pipeline.max-staleness 3" in refused.stderr
    rlhf.run("train", "--resume", run)
    draws = [draw for draws in ledger_of(run).values() for draw in draws]
    assert sorted(number for number, *_ in draws) == list(range(STEPS * 4)), "every draw once"
    assert [number for number, *_ in draws] != list(range(STEPS * 4)), "some were passed"
    assert {outcome for *_, outcome in draws} == {"trained"}
    assert 1 < max(row["staleness/max"] for row in rows_of(run).values() if row["step"]) <= 3
    assert sorted(rows_of(run)) == list(range(1, STEPS + 1))


COUNTED = """
import asyncio
from pathlib import Path


async def vowels(text, prompt):
    while prompt == SLOW and not Path(__file__).with_suffix(".go").exists():
        await asyncio.sleep(0.05)
    await asyncio.sleep(prompt in LATE)
    with Path(__file__).with_suffix(".txt").open("a") as file:
        file.write(prompt + "\\n")
    return sum(letter in "aeiou" for letter in text) / 8
"""


@pytest.fixture(scope="module")
def interrupted(rlhf_process, flags, synchronous, tmp_path_factory):
    """A run that was interrupted while it waited for its fifth batch, and its reward's file. The seventh batch is scored a while
    after the checkpoint of step 4."""
    directory = tmp_path_factory.mktemp("interrupted")
    run, reward = directory / "run", directory / "counted.py"
    tasks, _ = synchronous
    reward.write_text(COUNTED.replace("SLOW", repr(tasks[5][1])).replace("LATE", repr(tasks[7])))
    calls = reward.with_suffix(".txt")
    flags = [f"{reward}:vowels" if flag == "vowels" else flag for flag in flags]
    process = rlhf_process.start(*flags, "--run-dir", run, "--async-depth", "2")
    until = time.monotonic() + 60
    begun = 7 * 4 * 4  # answers of the four batches that were trained, of the one that is waited for, and of two more
    while (not calls.exists() or len(calls.read_text().splitlines()) < begun - 4) and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(1)  # what is written is given back a little later
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    reward.with_suffix(".go").touch()
    return run, reward


@pytest.fixture
def waiting(interrupted, tmp_path):
    """A copy of that run, and the file to which its reward writes what it scores."""
    run, reward = interrupted
    return shutil.copytree(run, tmp_path / "run", symlinks=True), reward.with_suffix(".txt")


def test_what_is_over_when_a_run_is_interrupted_is_in_its_checkpoint(waiting, rlhf, synchronous):
    run, calls = waiting
    tasks, _ = synchronous
    before = calls.read_text().splitlines()
    assert {*tasks[5], *tasks[6], *tasks[7]} - {*before} == {tasks[5][1]}
    rlhf.run("train", "--resume", run)
    assert (tasks_of(run), ledger_of(run)) == synchronous
    assert len(calls.read_text().splitlines()) == STEPS * 4 * 4, "nothing was scored twice"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--train.batch-size", "1"], "finished groups of the checkpoint are sampled again: train.batch_size changed"),
        (["--rollout.n", "2"], "finished groups of the checkpoint are sampled again: rollout changed"),
        (["--reward", "picky", "--rollout.max-unjudged", "1"], "sampled again: reward changed"),
        (["--async-depth", "0"], "sampled again: async_depth is 0, and they are of older weights"),
    ],
)
def test_groups_that_would_not_be_made_so_now_are_sampled_again(waiting, rlhf, more, said):
    run, _ = waiting
    done = rlhf.run("train", "--resume", run, *more)
    assert said in done.stderr
    numbers = [number for draws in ledger_of(run).values() for number, *_ in draws]
    assert numbers == list(range(len(numbers)))


def test_a_run_may_be_resumed_at_another_depth(rlhf, flags, synchronous, tmp_path):
    run = tmp_path / "run"
    rlhf.run(*flags, "--run-dir", run, "--async-depth", "3", "--train.steps", "4")
    rlhf.run("train", "--resume", run, "--async-depth", "0", "--train.steps", "7")
    rlhf.run("train", "--resume", run, "--async-depth", "1", "--train.steps", STEPS)
    assert (tasks_of(run), ledger_of(run)) == synchronous


def values(run):
    """The rows of ``metrics.jsonl`` without what measures this machine."""
    machine = ("time/", "memory/", "engine/", "sync/", "tokens_per_s", "tflops", "mfu")
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in row.items() if not key.startswith(machine)} for row in rows]


@pytest.fixture(scope="module")
def fixed(flags, prompts):
    """A run with updates of its weights, filters that drop, and evaluations."""
    more = ("--async-depth", "2", "--pipeline.schedule", "fixed", "--train.minibatches", "2", "--kl.coef", "0.05")
    return [*flags, *more, "--checkpoint.keep", "2", "--with", "dynamic_filtering", "--eval.data", prompts, "--eval.every", "3"]


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
    ledger = ledger_of(whole)
    assert ledger_of(again) == ledger
    assert sum(outcome.startswith("dropped: ") for draws in ledger.values() for *_, outcome in draws) == sum(
        row["rollout/dropped"] for row in rows if row["step"]
    )


def test_an_evaluation_is_of_one_version(rlhf, flags, prompts, tmp_path):
    """While episodes of later batches are open, and as the checkpoint of that step gives it."""
    run = tmp_path / "run"
    held_out = (
        "--checkpoint.keep",
        "0",
        "--eval.data",
        prompts,
        "--eval.every",
        "4",
        "--eval.n",
        "2",
        "--eval.max-new-tokens",
        "8",
    )
    rlhf.run(*flags, "--run-dir", run, "--async-depth", "2", *held_out)
    for step in (4, 8):
        file = run / f"trajectories/eval-step-{step:06d}.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert {version for row in rows for version in row["segments"][1]["versions"]} == {step}
        again = json.loads(rlhf.run("eval", "--checkpoint", run / f"checkpoints/step-{step:06d}", "--json").stdout)
        for name in ("eval/reward/mean", "eval/length/mean"):
            assert again[name] == pytest.approx(rows_of(run)[step][name], abs=1e-6)


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
        (["--with", "tis", "--train.old-logprobs", "sampler"], "extension:tis does not work with train.old_logprobs sampler"),
        (["--algo.loss", "gspo"], "recompute nothing corrects for the versions that sampled: add a correction (--with tis)"),
        (["--in-flight-updates", "true"], "and engine transformers samples from the trainer's own module: use --runtime ray"),
        (["--pipeline.max-staleness", "1"], "pipeline.max_staleness is 1, and async_depth 1 is not less"),
        (["--pipeline.max-staleness", "2", "--async-depth", "0"], "and async_depth is 0, so no draw can pass another one"),
        (["--pipeline.max-staleness", "2", "--pipeline.schedule", "fixed"], "so batches depend on time, and pipeline.schedule"),
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


OVERLAP_SAFE = """
import asyncio, json, os, pathlib, random
from pydantic import BaseModel
from rlhf_host import RewardNeeds, hookimpl

class Slow:
    class Options(BaseModel):
        pass
    def __init__(self, options):
        self.begun, self.scored = [], []
    @hookimpl
    def needs(self):
        return RewardNeeds(overlap_safe=True)
    @hookimpl
    async def score(self, trajectories):
        self.begun.append(trajectories[0].group_id)
        await asyncio.sleep(random.random() / 5)
        self.scored.append(trajectories[0].group_id)
        count, number = json.loads(pathlib.Path("end.json").read_text())
        if len(self.scored) == count:
            os.kill(os.getpid(), number)
        return [float(len(trajectory.text)) for trajectory in trajectories]
    @hookimpl
    def state_dict(self):
        return {"begun": self.begun, "scored": self.scored}
    @hookimpl
    def load_state_dict(self, state):
        self.begun, self.scored = list(state["begun"]), list(state["scored"])
    @hookimpl
    def run_finished(self, outcome):
        with open("counted.json", "w") as file:
            json.dump([self.begun, self.scored], file)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_reward_with_a_state_counts_each_group_once(site, flags, tmp_path, number):
    """However often the run is ended while groups are being scored."""
    site.install("slow", {"rlhf.rewards": "slow = slow:Slow"}, {"slow.py": OVERLAP_SAFE})
    run = tmp_path / "run"
    flags = ["slow" if flag == "vowels" else flag for flag in flags]
    first = [*flags, "--run-dir", run, "--async-depth", "2", "--checkpoint.every", "1"]
    for killed_at in (9, 17, 26, 37):
        again = ["train", "--resume", run] if run.exists() else first
        (site.folder / "end.json").write_text(json.dumps([killed_at, int(number)]))
        done = site.rlhf(*again)
        assert done.returncode == (130 if number == signal.SIGINT else -number), done.stderr
    (site.folder / "end.json").write_text("[-1, 0]")
    done = site.rlhf("train", "--resume", run)
    assert done.returncode == 0, done.stderr
    trained = {f"train-{draw[0]}" for draws in ledger_of(run).values() for draw in draws}
    assert len(trained) == STEPS * 4
    for counted in json.loads((site.folder / "counted.json").read_text()):
        assert len(counted) == len({*counted}), "counted twice"
        assert trained <= {*counted}


def test_data_with_answers_is_refused(site, tiny_model, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "completion": "2"}\n')
    done = site.rlhf("train", "--algo", "sft", "--actor.model", tiny_model, "--data", rows, "--async-depth", "1", "--dry-run")
    assert done.returncode == 2
    assert "async_depth is 1, and nothing is sampled: leave --async-depth out" in done.stderr
