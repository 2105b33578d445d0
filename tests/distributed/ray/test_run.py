"""Whole runs on Ray through the real command line: as the local runtime trains, refused at the door, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from rlhf_authoring.models import write_tiny_model

pytest.importorskip("ray")

pytestmark = pytest.mark.timeout(900)

RAY = ("--runtime", "ray", "--ray.num-cpus", "4", "--ray.num-gpus", "0", "--ray.object-store-mb", "200")

PROBE = """
from pydantic import BaseModel
from rlhf_host import Metric, hookimpl


class Probe:
    class Options(BaseModel):
        factor: float = 1.0

    def __init__(self, options):
        self.options = options

    @hookimpl
    def compute_loss(self, outputs, batch):
        return [Metric("probe/logprobs", self.options.factor * outputs.logprobs, batch.action_mask)]
"""
"""A plugin in a file, which workers import for themselves."""


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def processes(marker: str | Path) -> list[str]:
    """Command lines and environments of living processes that mention ``marker``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "cmdline").read_text() + (entry / "environ").read_text()
            except (OSError, UnicodeDecodeError):
                continue
            if str(marker) in text:
                found.append(text.replace("\0", " ")[:200])
    return found


@pytest.fixture
def ray_dir(tmp_path_factory):
    """A short temporary directory for Ray, empty again after the run, although a killed run left something there."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as made:
        left = Path(made) / "rlhf-ray-killed"
        left.mkdir()
        os.utime(left, (0, 0))
        yield Path(made)
        deadline = time.monotonic() + 30
        while (left := processes(made)) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert left == []
        assert list(Path(made).iterdir()) == []


def test_two_ranks_and_two_engines_train_as_one_process_does_and_resume(rlhf, small_run, tmp_path, ray_dir):
    (tmp_path / "probe.py").write_text(PROBE)
    common = [*small_run, "--train.steps", "4", "--with", f"{tmp_path}/probe.py:Probe", "--with.Probe.factor", "2"]
    rlhf.run(*common, "--run-dir", tmp_path / "local")
    there = [*common, *RAY, "--ray.temp-dir", ray_dir, "--placement", "actor=2", "--placement", "rollout=2"]
    rlhf.run(*there, "--run-dir", tmp_path / "ray")
    local, ray = metrics(tmp_path / "local"), metrics(tmp_path / "ray")
    assert [row["step"] for row in ray] == [row["step"] for row in local]
    for here, over in zip(local, ray, strict=True):
        assert over["mismatch/max"] < 1e-4
        for name in ("reward/mean", "tokens", "grad_norm", "lr", "version", "rollout/groups", "entropy", "probe/logprobs"):
            assert over[name] == pytest.approx(here[name], rel=1e-3, abs=1e-5), name

    # As many as there are now may differ from those that wrote the checkpoint.
    rlhf.run("train", "--resume", tmp_path / "ray", "--train.steps", "5", "--placement", "actor=1", "--placement", "rollout=1")
    rlhf.run("train", "--resume", tmp_path / "local", "--train.steps", "5")
    here, over = metrics(tmp_path / "local")[-1], metrics(tmp_path / "ray")[-1]
    assert (over["step"], over["version"]) == (5, 5)
    assert over["reward/mean"] == pytest.approx(here["reward/mean"], rel=1e-3)
    assert over["grad_norm"] == pytest.approx(here["grad_norm"], rel=1e-2)


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_two_ranks_compute_in_16_bits_and_engines_get_their_weights(rlhf, small_run, tmp_path, ray_dir, engine):
    if engine == "vllm":
        pytest.importorskip("vllm")
    options = {"transformers": ("--engine.autocast", "bfloat16"), "vllm": ("--engine.dtype", "bfloat16")}[engine]
    model = write_tiny_model(tmp_path / "model", hidden=128)  # vLLM has no attention kernel for narrower heads on CPUs
    common = [*small_run, "--actor.model", model, "--train.steps", "3", "--train.autocast", "bfloat16"]
    common += ["--engine", engine, *options]
    there = [*RAY, "--ray.temp-dir", ray_dir, "--placement", "actor=2", "--placement", "rollout=1", "--sync.verify", "on"]
    rlhf.run(*common, *there, "--checkpoint.every", "2", "--checkpoint.keep", "0", "--run-dir", tmp_path / "ray")
    rows = metrics(tmp_path / "ray")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["mismatch/max"] for row in rows) < 0.2
    assert min(row["grad_norm"] for row in rows) > 0
    assert json.loads((tmp_path / "ray/model/config.json").read_text())["dtype"] == "float32"
    size = (tmp_path / "ray/model/model.safetensors").stat().st_size
    rlhf.run("train", "--resume", tmp_path / "ray", "--train.steps", "4")
    assert (tmp_path / "ray/model/model.safetensors").stat().st_size == size
    assert metrics(tmp_path / "ray")[-1]["step"] == 4


def test_ctrl_c_writes_a_checkpoint_and_leaves_no_process(rlhf_process, small_run, tmp_path, ray_dir):
    process = rlhf_process.start(
        *small_run, "--train.steps", "100000", *RAY, "--ray.temp-dir", ray_dir, "--run-dir", tmp_path / "run"
    )
    rows = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (rows.exists() and rows.read_text().count("\n") >= 2):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert processes(ray_dir)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "a checkpoint is written" in out
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_sigterm_while_models_load_ends_a_run_as_ctrl_c_does(rlhf_process, small_run, tmp_path, ray_dir):
    process = rlhf_process.start(*small_run, *RAY, "--ray.temp-dir", ray_dir, "--run-dir", tmp_path / "run")
    deadline = time.monotonic() + 300
    while not any("WorkerActor" in text for text in processes(ray_dir)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.terminate()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, out + err
    assert err.splitlines()[-2:] == ["Loading actor, starting the engine transformers ...", "Interrupted."]
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_the_exit_that_ray_sets_for_sigterm_while_it_starts_is_an_interrupt():
    from rlhf_host.distributed.ray.cluster import _sigterm_as_before

    @_sigterm_as_before()
    def starts():
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))
        signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        starts()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_placement_the_cluster_cannot_hold_is_refused_before_anything_is_written(rlhf, small_run, tmp_path, ray_dir):
    refused = rlhf.run(
        *small_run,
        *RAY,
        *(
            "--ray.temp-dir",
            ray_dir,
            "--run-dir",
            tmp_path / "run",
            "--placement",
            "actor+rollout=3",
            "--placement",
            "reference=2",
        ),
        *("--kl.coef", "0.1"),
        code=2,
    )
    assert "the placement needs 5 CPUs (actor+rollout 3 + reference 2), and the cluster has 4" in refused.stderr
    assert "--ray.num-cpus" in refused.stderr
    assert not (tmp_path / "run").exists()


def test_a_training_worker_that_dies_ends_the_run_with_one_line_and_no_process(rlhf, small_run, tmp_path, ray_dir):
    process = rlhf.start(*small_run, "--train.steps", "100000", *RAY, "--ray.temp-dir", ray_dir, "--run-dir", tmp_path / "run")
    rows = tmp_path / "run" / "metrics.jsonl"
    kill_worker(process, ray_dir, lambda: rows.exists() and rows.read_text().count("\n") >= 2)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1, err
    assert "a worker of actor is lost" in err
    assert "Traceback" not in err


def test_a_run_whose_worker_dies_begins_again_from_its_last_checkpoint(rlhf, small_run, tmp_path, ray_dir):
    """The values are those of a run that was left alone."""
    saved = ("--checkpoint.every", "1", "--train.steps", "12")
    rlhf.run(*small_run, *saved, "--run-dir", tmp_path / "whole")
    run = tmp_path / "run"
    process = rlhf.start(*small_run, *saved, *RAY, "--ray.temp-dir", ray_dir, "--run-dir", run, "--max-restarts", "1")
    kill_worker(process, ray_dir, lambda: (run / "checkpoints/step-000003").exists())
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert "a worker of actor is lost" in err
    assert re.search(r"It goes on from the checkpoint of step \d+\b.*\(restart 1 of 1\)", err)
    assert "Traceback" not in out + err
    rewards = [[row["reward/mean"] for row in metrics(each)] for each in (run, tmp_path / "whole")]
    assert rewards[0] == pytest.approx(rewards[1], abs=1e-6)
    assert [row["step"] for row in metrics(run)] == list(range(1, 13))


@pytest.mark.parametrize("killed", ["controller", "supervisor"])
def test_a_run_goes_on_after_its_controller_or_its_supervisor_is_killed(rlhf, small_run, tmp_path, ray_dir, killed):
    """After the supervisor, when the same command is given again."""
    psutil = pytest.importorskip("psutil")
    saved = ("--checkpoint.every", "1", "--train.steps", "12")
    rlhf.run(*small_run, *saved, "--run-dir", tmp_path / "whole")
    run = tmp_path / "run"
    command = (*small_run, *saved, *RAY, "--ray.temp-dir", ray_dir, "--run-dir", run, "--max-restarts", "1")
    process = rlhf.start(*command)
    wait_until(process, lambda: (run / "checkpoints/step-000003").exists())
    (controller,) = psutil.Process(process.pid).children()
    if killed == "controller":
        controller.kill()
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert "it was killed by SIGKILL" in err
        assert "(restart 1 of 1)" in err
        (left,) = ray_dir.iterdir()
        shutil.rmtree(left)  # a directory without a lock may be a new one for a minute; then the next run removes it
    else:
        process.kill()
        process.communicate(timeout=300)
        assert not psutil.wait_procs([controller], timeout=300)[1]
        done = rlhf.run(*command)
        out, err = done.stdout, done.stderr
    assert "Traceback" not in out + err
    rewards = [[row["reward/mean"] for row in metrics(each)] for each in (run, tmp_path / "whole")]
    assert rewards[0] == pytest.approx(rewards[1], abs=1e-6)
    assert [row["step"] for row in metrics(run)] == list(range(1, 13))


PYTHON = """
import sys
import rlhf_host

model, data, ray_dir, run = sys.argv[1:]
ray = {"name": "ray", "num_cpus": 4, "num_gpus": 0, "object_store_mb": 200, "temp_dir": ray_dir}
rlhf_host.train(
    algo="rloo", rewards="vowels", model=model, data=data, lr=1e-3, n=4, max_new_tokens=8, batch_size=4, steps=12, kernels="none",
    checkpoint={"every": 1}, runtime=ray, run_dir=run, max_restarts=1, **{"train.threads": 1},
)
"""


def test_from_python_a_lost_worker_is_replaced_in_the_same_process(fork, environment, tiny_model, prompts, tmp_path, ray_dir):
    run, script = tmp_path / "run", tmp_path / "script.py"
    script.write_text(PYTHON)
    process = fork([tiny_model, prompts, ray_dir, run], environment, program=script)
    kill_worker(process, ray_dir, lambda: (run / "checkpoints/step-000003").exists())
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert "Restarting from it (1 of 1)" in err
    assert [row["step"] for row in metrics(run)] == list(range(1, 13))


def wait_until(process, ready):
    """Waits until ``ready()``, while a started run goes on."""
    deadline = time.monotonic() + 300
    while not ready():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill_worker(process, ray_dir, ready):
    """Kills the training worker of a started run as soon as ``ready()``."""
    wait_until(process, ready)
    os.kill(worker_pid(ray_dir), signal.SIGKILL)


def worker_pid(ray_dir: Path) -> int:
    """The process that Ray has titled with the worker's class."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if "WorkerActor" in (entry / "cmdline").read_text() and str(ray_dir) in (entry / "environ").read_text():
                    return int(entry.name)
            except OSError:
                continue
    raise AssertionError("no worker found")
