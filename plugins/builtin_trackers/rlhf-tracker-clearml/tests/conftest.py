"""Runs of the real command line in a process of its own, and what a run hands to its trackers."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_host import RunContext, Segment, Task, Trajectory

END = '''"""Ends a run as ENDING says."""
import os
import signal

from rlhf_host import hookimpl


class End:
    @hookimpl
    def step_finished(self, step, metrics):
        if step == 4 and os.environ.get("ENDING") == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 2 and os.environ.get("ENDING") == "fail":
            raise RuntimeError("the test ends it ✓")
'''
SMALL = {
    "--rollout.n": "2",
    "--rollout.max-new-tokens": "6",
    "--train.batch-size": "4",
    "--train.threads": "1",
    "--checkpoint.every": "2",
    "--data.max-samples": "64",
    "--eval.data": "arithmetic",
    "--eval.data.arithmetic.count": "8",
    "--trajectories.every": "1",
}
ODD_METRICS: dict[str, Any] = {
    "reward/mean": 0.5,
    "nan": math.nan,
    "inf": math.inf,
    "eval/pass@1": 0.25,
    "eval/pass_at_1": 0.75,
    'eval/äöü (50%), "q"': 1.5,
    "../up//down/": 2.5,
    "long/" + "a" * 400: 3.5,
    "step": 4.5,
    "text": "no number",
}
HOSTILE = "\x1b[2J<b>bold</b> \x00 \ud800 \u202e ✓," + "x" * 20_000
"""Text that a model may write: escape sequences, markup, half a character, and much of it."""


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home without ClearML's configuration, for its note of the last task."""
    for name in ("CLEARML_OFFLINE_MODE", "CLEARML_CACHE_DIR", "CLEARML_API_ACCESS_KEY", "CLEARML_API_SECRET_KEY"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.fixture
def rlhf(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``rlhf(...)`` in ``tmp_path``, which has ``end.py``."""
    (tmp_path / "end.py").write_text(END, encoding="utf-8")

    def run(*arguments: str, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        # ClearML leaves notes for processes that belong to its task.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("CLEARML_", "TRAINS_"))}
        environment = {
            **inherited,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "200",
            "PYTHONDONTWRITEBYTECODE": "1",
            **variables,
        }
        command = [sys.executable, "-m", "rlhf_host", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
        )
        assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture
def train(rlhf: Callable[..., Any]) -> Callable[..., Any]:
    """``train(...)``: a small run in ``tmp_path/run``."""
    small = [part for pair in SMALL.items() for part in pair]
    return lambda *arguments, **how: rlhf(
        *("train", "--algo", "rloo", "--reward", "math_verifier", "--with", "end.py:End", "--run-dir", "run"),
        *small,
        *arguments,
        **how,
    )


@pytest.fixture
def context(tmp_path: Path) -> Callable[..., RunContext]:
    def make(resume_step: int | None = None, **config: Any) -> RunContext:
        return RunContext(config, None, tmp_path / "run", 0, {}, resume_step is not None, resume_step or 0)

    return make


@pytest.fixture
def trajectory() -> Callable[..., Trajectory]:
    def make(prompt: str = "2+3=", text: str = "5", **fields: Any) -> Trajectory:
        def ids(part: str) -> list[int]:
            return [ord(character) for character in part]

        segments = [Segment("prompt", ids(prompt)), Segment("action", ids(text), [-0.5] * len(text), [1] * len(text))]
        made = Trajectory(
            "episode-0", "group-0", Task(prompt, "5"), segments, decode=lambda found: "".join(map(chr, found)), **fields
        )
        made.reward = made.score = 1.0
        return made

    return make


def logged(run_dir: Path) -> dict[int, dict[str, float]]:
    """Step → metrics, of the run's own file, without what is not finite and what only that file has."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()]
    return {
        row["step"]: {name: value for name, value in row.items() if name not in ("step", "time/wall") and value is not None}
        for row in rows
    }


def sampled(run_dir: Path, split: str, step: int) -> list[dict[str, Any]]:
    """Trajectories of the run's own file."""
    path = run_dir / f"trajectories/{split}-step-{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
