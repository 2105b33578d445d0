from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rlhf_host.commands import main
from rlhf_host.settings import write_yaml

SETTINGS = {
    "algo": {"name": "rloo", "clip_eps": 0.2},
    "reward": {"exact": {"name": "exact", "weight": 1.0}},
    "roles": {"actor": {"model": "models/small", "lr": 1e-6}},
    "data": {"sources": ["train.jsonl"]},
    "train": {"steps": 20},
    "checkpoint": {"best": None},
}
PLUGINS = [
    {"kind": "algo", "alias": "rloo", "name": "rloo", "weight": None},
    {"kind": "reward", "alias": "exact", "name": "exact", "weight": 2.0},
]


@pytest.fixture
def rlhf_here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command line in this process."""
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def rlhf_process() -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command line in a process of its own, which must succeed."""

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rlhf_host.cli.main", *map(str, arguments)]
        return subprocess.run(command, env={**os.environ, "COLUMNS": "120"}, capture_output=True, text=True, check=True)

    return run


@pytest.fixture
def make(tmp_path):
    """A made-up run directory."""

    def made(name, *, slope=0.01, steps=20, settings=None, about=None, entropy=1.0, evaluated=None):
        run = tmp_path / "runs" / name
        (run / "trajectories").mkdir(parents=True)
        run.joinpath("config.yaml").write_text(write_yaml(SETTINGS | (settings or {})))
        run.joinpath("plugins.json").write_text(json.dumps(PLUGINS))
        ended = {"started": 1_700_000_000.0 + len(list(run.parent.iterdir())), "status": "finished", "steps": 20}
        run.joinpath("run.json").write_text(json.dumps(ended | (about or {})))
        rows = []
        for step in range(steps + 1):
            row = {"step": step, "reward/mean": 0.2 + slope * step, "entropy": entropy * 0.5**step} if step else {"step": 0}
            rows.append(row | ({"eval/pass@1": 0.2 + slope * step} | (evaluated or {}) if step % 10 == 0 else {}))
        run.joinpath("metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        draws = [[number, "train.jsonl", number, "trained" if number else "dropped: hard"] for number in range(5)]
        run.joinpath("ledger.jsonl").write_text(json.dumps({"step": 1, "version": 0, "draws": draws}) + "\n")
        answers = [
            {"source": "s", "task": task, "prompt": f"{task}+1=", "text": f"{name} says {task}", "label": str(task + 1)}
            | {"reward": float(task), "length": 3}
            for task in range(4)
        ]
        for split in ("train", "eval"):
            file = run / f"trajectories/{split}-step-{steps:06d}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in answers))
        return run

    return made
