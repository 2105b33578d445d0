"""Reading run directories: of real runs however they ended, and of what killed ones leave."""

from __future__ import annotations

import json
import shutil
import signal
import time

import pytest

import rlhf_host
from rlhf_host.errors import UserError
from rlhf_host.runs.directory import RunDirectory, flat


@pytest.fixture(scope="module")
def finished(rlhf, tiny_model, prompts, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "finished"
    small = ("--rollout.n", "2", "--rollout.max-new-tokens", "4", "--train.batch-size", "2", "--train.threads", "1")
    model = ("train", "--algo", "rloo", "--reward", "vowels", "--actor.model", tiny_model, "--data", prompts)
    rlhf.run(*model, *small, "--kernels", "none", "--train.steps", "4", "--eval.data", prompts, "--run-dir", run)
    return run


def test_a_finished_run(finished):
    run = RunDirectory(finished)
    assert (run.status, run.step, run.steps, run.headline) == ("finished", 4, 4, "eval/pass@1")
    assert run.settings["algo"]["name"] == "rloo"
    assert {plugin["kind"] for plugin in run.plugins} >= {"algo", "reward"}
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert run.metrics == lines
    assert run.curve("reward/mean") == ([1, 2, 3, 4], [row["reward/mean"] for row in lines[1:]])
    assert run.curve("eval/reward/mean")[0] == [0, 4]
    assert run.draws == {"trained": 8}
    assert [*run.trajectories] == [("eval", 0), ("train", 1), ("train", 2), ("train", 3), ("eval", 4), ("train", 4)]
    assert len(run.rows("train", 3)) == 4
    about = run.about
    assert about["ended"] >= about["started"]
    assert (about["rlhf_host"], about["resumed_after"]) == (rlhf_host.__version__, [])


def test_a_metric_that_there_is_not(finished):
    with pytest.raises(UserError, match=r"has no metric 'reward/men'.*reward/mean"):
        RunDirectory(finished).curve("reward/men")


def test_what_a_killed_run_left_half_written(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(about | {"status": "running"}))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "reward/me')
    with (run / "trajectories/train-step-000004.jsonl").open("a") as file:
        file.write('{"text": "ab')
    found = RunDirectory(run)
    assert (found.status, found.step) == ("killed", 4)
    assert len(found.rows("train", 4)) == 4


def test_a_run_of_an_older_version(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "run.json").unlink()
    assert (RunDirectory(run).status, RunDirectory(run).steps) == ("finished", 4)
    shutil.rmtree(run / "model")
    assert RunDirectory(run).status == "killed"


def test_how_runs_end(rlhf_process, rlhf, small_run, tmp_path):
    run = tmp_path / "run"
    process = rlhf_process.start(*small_run, "--train.steps", "1000", "--checkpoint.every", "2", "--run-dir", run)
    until = time.monotonic() + 60
    while not (run / "checkpoints/step-000002").exists() and time.monotonic() < until:
        time.sleep(0.02)
    found = RunDirectory(run)
    assert (found.status, found.steps) == ("running", 1000)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert RunDirectory(run).status == "killed"
    process = rlhf_process.start("train", "--resume", run)
    until, step = time.monotonic() + 60, RunDirectory(run).step
    while RunDirectory(run).step <= step and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    found = RunDirectory(run)
    assert (found.status, len(found.about["resumed_after"])) == ("interrupted", 1)
    assert found.about["step"] == found.step
    rlhf.run("train", "--resume", run, "--train.steps", found.step + 2, "--reward", "broken", "--force", code=1)
    found = RunDirectory(run)
    assert found.status == "failed"
    assert "broken" in found.about["error"]


def test_the_same_object_as_of_train(finished):
    run = rlhf_host.load_run(finished)
    assert (run.outcome.status, run.outcome.step, run.run_dir) == ("finished", 4, finished)
    assert run.config.rollout.n == 2
    assert run.files.headline == "eval/pass@1"
    assert run.metrics[-1]["step"] == 4
    [answers] = run.generate(["1+1="], n=2, max_new_tokens=3)
    assert len(answers) == 2
    with pytest.raises(UserError, match=r"nowhere: no such run directory"):
        rlhf_host.load_run(finished.parent / "nowhere")


def test_dotted_names():
    assert flat({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}
