"""Checkpoints are written while training goes on, and are of exactly one step; what goes wrong meanwhile is told."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

import rlhf_host
from rlhf_host import RunError, UserError, hookimpl
from rlhf_host.backends.torch_backend import TorchBackend
from rlhf_host.training.checkpoints import checkpoint_dirs, load_checkpoint
from rlhf_host.training.keeper import Saving

MACHINE = ("time/", "memory/", "engine/", "sync/", "tokens_per_s", "tflops", "mfu")


def judge(text):
    return sum(char in "aeiou" for char in text) / 8


class Watches:
    """Calls ``at[step]`` when a step is finished."""

    def __init__(self, at=None):
        self.at = at or {}

    @hookimpl
    def step_finished(self, step, metrics):
        if step in self.at:
            self.at[step]()


def train(run_dir, model, data, at=None, **settings):
    """Six steps, checkpoints after every second; ``at`` is as of ``Watches``."""
    small = {"rollout": {"n": 4, "max_new_tokens": 8}, "actor.lr": 1e-3, "kernels": "none", "eval.at_start": False}
    small |= {"train.steps": 6, "train.batch_size": 2, "train.threads": 1, "checkpoint.every": 2, "checkpoint.keep": 0}
    where = {"resume": run_dir} if (run_dir / "config.yaml").exists() else {"run_dir": str(run_dir)}
    chosen = {"algo": "rloo", "rewards": {"judge": judge}, "extensions": {"watches": Watches(at)}}
    return rlhf_host.train(**chosen, model=model, data=data, **where, **(small | settings))


def curve(run):
    return [{key: value for key, value in row.items() if not key.startswith(MACHINE)} for row in run.metrics]


class Writers:
    """Every checkpoint's optimizer is written by ``each(step, write)``."""

    def __init__(self, monkeypatch, each):
        copied = TorchBackend.save

        def save(backend, directory):
            write, step = copied(backend, directory), int(directory.parents[1].name.removesuffix(".partial")[-6:])
            return lambda: each(step, write)

        monkeypatch.setattr(TorchBackend, "save", save)


@pytest.fixture
def blocked(monkeypatch):
    """The checkpoint of step 2 is not written before the event is set."""
    event = threading.Event()

    def each(step, write):
        assert step != 2 or event.wait(60)
        write()

    Writers(monkeypatch, each)
    return event


@pytest.fixture
def plain(tiny_model, prompts, tmp_path):
    """The rows of a run of the same settings that is never disturbed."""

    def run(**settings):
        return curve(train(tmp_path / "plain", tiny_model, prompts, **{"checkpoint.every": 0} | settings))

    return run


def only(run_dir: Path, step: int) -> None:
    """Leave the checkpoint of this step alone, as if the run had been killed before the next."""
    shutil.rmtree(run_dir / "model", ignore_errors=True)
    for number, path in checkpoint_dirs(run_dir):
        if number != step:
            shutil.rmtree(path)


WAYS = [
    {},
    {"async_depth": 2},
    {"actor.lora.rank": 4},
    {"train.epochs": 2, "kl.coef": 0.05, "kl.controller": "adaptive", "kl.horizon": 100},
]


@pytest.mark.parametrize("settings", WAYS, ids=["plain", "async", "lora", "kl"])
def test_a_checkpoint_is_of_one_step_though_training_goes_on(tiny_model, prompts, tmp_path, blocked, plain, settings):
    run_dir = tmp_path / "run"
    there = []

    def look():
        there.extend(sorted(path.name for path in (run_dir / "checkpoints").iterdir()))
        blocked.set()

    run = train(run_dir, tiny_model, prompts, {3: look}, **settings)
    assert there == [".step-000002.partial"]
    assert [step for step, _ in checkpoint_dirs(run_dir)] == [2, 4, 6]
    assert (run_dir / "checkpoints/last").resolve().name == "step-000006"
    assert [row["step"] for row in run.metrics if row.get("time/checkpoint", 0) > 0] == [3, 5]
    whole = plain(**settings)
    assert curve(run) == whole
    (file,) = (run_dir / "model").glob("*.safetensors")
    weights = load_file(file)
    only(run_dir, 2)
    assert curve(train(run_dir, tiny_model, prompts)) == whole
    resumed = load_file(file)
    assert resumed.keys() == weights.keys()
    assert all(resumed[name].equal(weights[name]) for name in weights)


def test_the_next_checkpoint_waits_for_the_one_before(tiny_model, prompts, tmp_path, monkeypatch):
    writing, most, awaited, wait = [], [], threading.Semaphore(0), Saving.wait

    def each(step, write):
        writing.append(step)
        most.append(len(writing))
        assert awaited.acquire(timeout=60)
        threading.Event().wait(0.1)
        write()
        writing.remove(step)

    def noticed(saving):
        awaited.release()
        wait(saving)

    monkeypatch.setattr(Saving, "wait", noticed)
    Writers(monkeypatch, each)
    settings = {"train.steps": 4, "checkpoint.every": 1, "checkpoint.keep": 2}
    run = train(tmp_path / "run", tiny_model, prompts, **settings)
    assert most == [1, 1, 1, 1]
    assert sum(row.get("time/checkpoint", 0.0) for row in run.metrics) > 0.2  # of steps 2 and 3, each 0.1 s or more
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["last", "step-000003", "step-000004"]


def full(*steps):
    def each(step, write):
        if step in steps:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write()

    return each


def test_a_full_disk_stops_the_run_which_keeps_its_last_step(tiny_model, prompts, tmp_path, monkeypatch):
    Writers(monkeypatch, full(4))
    message = r"step-000004 cannot be written: .*No space left on device; its disk has .* GB free, and more was to be written"
    with pytest.raises(RunError, match=rf"{message}: make room .*checkpoint.keep.*run_dir; continue from .*step-00000[56]"):
        train(tmp_path / "run", tiny_model, prompts)
    steps = [step for step, _ in checkpoint_dirs(tmp_path / "run")]
    assert steps in ([2, 5], [2, 6])
    assert not list((tmp_path / "run/checkpoints").glob(".*"))


def test_a_full_disk_is_a_warning_where_the_run_may_go_on(tiny_model, prompts, tmp_path, monkeypatch, caplog):
    Writers(monkeypatch, full(4))
    run = train(tmp_path / "run", tiny_model, prompts, **{"checkpoint.on_error": "warn"})
    assert run.outcome.status == "finished"
    assert [step for step, _ in checkpoint_dirs(tmp_path / "run")] == [2, 6]
    (line,) = [line for line in caplog.messages if "cannot be written" in line]
    assert "step-000004 cannot be written" in line
    assert line.endswith("--run-dir; the run goes on without this checkpoint (checkpoint.on_error is warn)")
    assert not list((tmp_path / "run/checkpoints").glob(".*"))


@pytest.mark.parametrize(
    ("failing", "settings"),
    [(6, {"checkpoint.on_error": "warn"}), (6, {"checkpoint.final": False}), (2, {"train.steps": 2})],
    ids=["warn", "not final", "final"],
)
def test_the_last_failure_is_never_lost(tiny_model, prompts, tmp_path, monkeypatch, failing, settings):
    Writers(monkeypatch, full(failing))
    with pytest.raises(RunError, match=f"step-00000{failing} cannot be written: .*No space left"):
        train(tmp_path / "run", tiny_model, prompts, **settings)
    assert not (tmp_path / "run/model").exists()


def test_what_cannot_be_copied_is_a_warning_too(tiny_model, prompts, tmp_path, monkeypatch, caplog):
    copied = TorchBackend.save_model

    def read_only(backend, directory):
        if "step-000002" in str(directory):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return copied(backend, directory)

    monkeypatch.setattr(TorchBackend, "save_model", read_only)
    train(tmp_path / "run", tiny_model, prompts, **{"checkpoint.on_error": "warn"})
    assert [step for step, _ in checkpoint_dirs(tmp_path / "run")] == [4, 6]
    (line,) = [line for line in caplog.messages if "cannot be written" in line]
    assert ": make the directory writable for this user; the run goes on" in line


def test_ctrl_c_waits_for_the_checkpoint_that_is_being_written(tiny_model, prompts, tmp_path, blocked, plain):
    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        threading.Timer(1.0, blocked.set).start()

    run = train(tmp_path / "run", tiny_model, prompts, {3: interrupt})
    assert (run.outcome.status, run.outcome.step) == ("interrupted", 3)
    assert [step for step, _ in checkpoint_dirs(tmp_path / "run")] == [2, 3]
    assert load_checkpoint(tmp_path / "run").step == 3
    assert curve(train(tmp_path / "run", tiny_model, prompts)) == plain()


def test_a_second_ctrl_c_waits_for_nothing(tiny_model, prompts, tmp_path, monkeypatch, plain):
    stuck = threading.Event()

    def each(step, write):
        assert step != 4 or stuck.wait(60)
        write()

    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()

    with monkeypatch.context() as patch:
        Writers(patch, each)
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "run", tiny_model, prompts, {5: interrupt})
        assert time.monotonic() - started < 30
    assert load_checkpoint(tmp_path / "run").step == 2
    stuck.set()
    for thread in threading.enumerate():
        if thread.name == "rlhf-checkpoint":
            thread.join(10)
    assert curve(train(tmp_path / "run", tiny_model, prompts)) == plain()


KILLED = """
import os, signal, sys, threading
from pathlib import Path
import pytest
from tests.training.test_checkpoint_writing import Writers, train

stuck = threading.Event()

def each(step, write):
    write()
    if step == 4:
        stuck.wait()

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

with pytest.MonkeyPatch.context() as patch:
    Writers(patch, each)
    train(Path(sys.argv[1]), sys.argv[2], sys.argv[3], {5: kill})
"""


def test_kill_9_while_a_checkpoint_is_written_leaves_the_one_before(tiny_model, prompts, tmp_path, plain):
    run_dir = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, run_dir, tiny_model, prompts], cwd=Path(__file__).parents[2], check=False
    )
    assert done.returncode == -signal.SIGKILL
    left = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert left == [".step-000004.partial", "last", "step-000002"]
    seen = []
    run = train(run_dir, tiny_model, prompts, {3: lambda: seen.extend((run_dir / "checkpoints").glob(".*"))})
    assert seen == []
    assert curve(run) == plain()


def test_a_run_killed_before_its_model_was_written_writes_it_when_resumed(tiny_model, prompts, tmp_path):
    run_dir = tmp_path / "run"
    train(run_dir, tiny_model, prompts, **{"train.steps": 2})
    before = (run_dir / "model/model.safetensors").read_bytes()
    shutil.rmtree(run_dir / "model")
    (run_dir / ".model.partial").mkdir()
    run = train(run_dir, tiny_model, prompts, **{"train.steps": 2})
    assert (run.outcome.status, run.outcome.step, len(run.metrics)) == ("finished", 2, 2)
    assert (run_dir / "model/model.safetensors").read_bytes() == before
    assert not (run_dir / ".model.partial").exists()
    # It went on to step 4, and was killed when model/ was still of step 2.
    shutil.copytree(run_dir / "model", tmp_path / "old")
    train(run_dir, tiny_model, prompts, **{"train.steps": 4})
    newest = (run_dir / "model/model.safetensors").read_bytes()
    assert newest != before
    shutil.rmtree(run_dir / "model")
    shutil.copytree(tmp_path / "old", run_dir / "model")
    os.utime(run_dir / "model", (0, 0))
    train(run_dir, tiny_model, prompts, **{"train.steps": 4})
    assert (run_dir / "model/model.safetensors").read_bytes() == newest
    with pytest.raises(UserError, match=r"is finished at step 4; raise steps"):
        train(run_dir, tiny_model, prompts, **{"train.steps": 4})
