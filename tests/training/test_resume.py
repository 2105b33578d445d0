"""A run that was killed or interrupted and then resumed is, value for value, the run that never was."""

import json
import signal
import socket
import time
from pathlib import Path

import pytest

from ..conftest import in_background

SETTINGS = [
    *("--train.steps", "6", "--checkpoint.every", "2", "--checkpoint.keep", "2", "--eval.every", "3", "--eval.n", "2"),
    *(
        "--train.minibatches",
        "2",
        "--train.epochs",
        "2",
        "--kl.coef",
        "0.05",
        "--kl.controller",
        "adaptive",
        "--kl.horizon",
        "100",
    ),
    *("--checkpoint.best", "eval/reward/mean"),
]


def curve(run_dir: Path) -> list[dict]:
    """The rows of ``metrics.jsonl`` without what measures this machine."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    machine = ("time/", "memory/", "engine/", "sync/", "tokens_per_s", "tflops", "mfu")
    return [{key: value for key, value in row.items() if not key.startswith(machine)} for row in rows]


@pytest.fixture(scope="module")
def flags(tiny_model, prompts):
    return [
        *(
            "train",
            "--algo",
            "rloo",
            "--reward",
            "vowels",
            "--actor.model",
            tiny_model,
            "--data",
            prompts,
            "--eval.data",
            prompts,
        ),
        *("--actor.lr", "1e-3", "--rollout.n", "4", "--rollout.max-new-tokens", "8", "--train.batch-size", "4"),
        *SETTINGS,
    ]


@pytest.fixture(scope="module")
def uninterrupted(rlhf, flags, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    rlhf.run(*flags, "--run-dir", run_dir)
    return run_dir


def wait_for(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def rows_written(run_dir):
    path = run_dir / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def test_the_uninterrupted_run_is_complete_and_moves(uninterrupted):
    rows = curve(uninterrupted)
    assert [row["step"] for row in rows] == list(range(7))
    assert [row["step"] for row in rows if "eval/reward/mean" in row] == [0, 3, 6]
    assert rows[6]["kl"] > 0
    assert rows[6]["kl/coef"] != rows[1]["kl/coef"]
    assert all(row["ratio/max_log"] > 1e-4 for row in rows[1:])
    evaluated = {row["step"]: row["eval/reward/mean"] for row in rows if "eval/reward/mean" in row}
    best = max(evaluated, key=lambda step: (evaluated[step], -step))
    kept = {path.name for path in (uninterrupted / "checkpoints").iterdir()}
    assert kept == {"step-000004", "step-000006", "best", "last"} | ({"step-000003"} if best == 3 else set())
    assert (uninterrupted / "checkpoints/best").resolve().name == f"step-{best:06d}"
    assert (uninterrupted / "checkpoints/last").resolve().name == "step-000006"
    assert (uninterrupted / "model" / "config.json").exists()


def test_kill_9_at_any_moment_changes_nothing(rlhf, flags, uninterrupted, tmp_path):
    """Killed before the first checkpoint, while a checkpoint is written, and in the middle of a step; resumed each time."""
    run_dir = tmp_path / "run"
    writing = [".step-000002.partial", ".step-000004.partial"]
    moments = [
        lambda: rows_written(run_dir) >= 1,
        lambda: (run_dir / "checkpoints" / writing[0]).exists(),
        lambda: rows_written(run_dir) >= 5,
        lambda: (run_dir / "checkpoints" / writing[1]).exists(),
    ]
    process = rlhf.start(*flags, "--run-dir", run_dir)
    for number, moment in enumerate(moments):
        wait_for(moment, process)
        if number == 0:
            process.send_signal(signal.SIGSTOP)
            refused = rlhf.run("train", "--resume", run_dir, code=2).stderr
            assert f"{run_dir} is in use by process {process.pid} on {socket.gethostname()}" in refused
        process.send_signal(signal.SIGKILL)
        process.communicate()
        process = rlhf.start("train", "--resume", run_dir)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert curve(run_dir) == curve(uninterrupted)
    assert not [path for path in (run_dir / "checkpoints").iterdir() if path.name.startswith(".")]


def test_an_evaluation_before_the_kill_changes_nothing_after_it(rlhf, flags, tmp_path):
    """Large enough for the engine to prepare its weights, which batches as small as the training's do not do by themselves."""
    evaluating = [*flags, "--train.steps", "4", "--eval.every", "1", "--eval.n", "16", "--checkpoint.every", "1"]
    rlhf.run(*evaluating, "--run-dir", tmp_path / "whole")
    process = rlhf.start(*evaluating, "--run-dir", tmp_path / "killed")
    wait_for(lambda: (tmp_path / "killed/checkpoints/step-000002").exists(), process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    rlhf.run("train", "--resume", tmp_path / "killed")
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_a_checkpoint_and_a_clean_exit(rlhf, rlhf_process, flags, uninterrupted, tmp_path, number):
    run_dir = tmp_path / "run"
    begin = rlhf_process if number == signal.SIGINT else rlhf
    process = begin.start(*flags, "--run-dir", run_dir)
    wait_for(lambda: rows_written(run_dir) >= 2, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, out + err
    assert "Traceback" not in out + err
    assert f"--resume {run_dir}" in out + err
    assert list((run_dir / "checkpoints").glob("step-*"))
    rlhf.run("train", "--resume", run_dir)
    assert curve(run_dir) == curve(uninterrupted)


def test_a_run_in_the_background_ignores_ctrl_c_and_ends_with_a_checkpoint_when_it_is_terminated(rlhf_process, flags, tmp_path):
    run_dir = tmp_path / "run"
    with in_background():
        process = rlhf_process.start(*flags, "--train.steps", "400", "--run-dir", run_dir)
    wait_for(lambda: rows_written(run_dir) >= 1, process)
    process.send_signal(signal.SIGINT)
    known = rows_written(run_dir)
    wait_for(lambda: rows_written(run_dir) >= known + 2, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, out + err
    assert list((run_dir / "checkpoints").glob("step-*"))


def test_a_finished_run_says_how_to_go_on(rlhf, uninterrupted):
    before = (uninterrupted / "metrics.jsonl").read_text()
    done = rlhf.run("train", "--resume", uninterrupted, code=2)
    assert "is finished at step 6; raise --train.steps" in done.stderr
    assert "Traceback" not in done.stderr
    assert (uninterrupted / "metrics.jsonl").read_text() == before
