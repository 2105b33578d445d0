"""What many tests share: a tiny real model, prompts, reward plugins installed for real, and the real command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlhf_host.testing.models import write_tiny_model

REWARDS = '''"""Rewards for tests."""
from pydantic import BaseModel
from rlhf_host import Reward, hookimpl

class Base:
    class Options(BaseModel):
        pass
    def __init__(self, options):
        self.options = options

class Vowels(Base):
    """A dense reward that a random model can raise."""
    @hookimpl
    def score(self, trajectories):
        found = [sum(c in "aeiou" for c in t.text) / 8 for t in trajectories]
        return [Reward(value, score=float(value > 0.25)) for value in found]

class Broken(Base):
    @hookimpl
    def score(self, trajectories):
        raise ConnectionError("the judge is down")

class Picky(Base):
    """Cannot judge the first sample of every group."""
    @hookimpl
    def score(self, trajectories):
        return [None if t.sample == 0 else float(len(t.text)) for t in trajectories]
'''
ENTRY_POINTS = "[rlhf.rewards]\n" + "".join(f"{name.lower()} = test_rewards:{name}\n" for name in ("Vowels", "Broken", "Picky"))


@dataclass(frozen=True)
class CommandLine:
    """The real ``rlhf`` in a process of its own."""

    environment: dict[str, str]

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "rlhf_host.cli.main", *map(str, arguments)],
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
        )

    def run(self, *arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=300)
        assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"prompt": f"{i}+{7 * i % 100}" + "a" * (i % 5) + "=", "label": str(i)} for i in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def reward_plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that, on the path, is an installed distribution of reward plugins."""
    root = tmp_path_factory.mktemp("plugins")
    about = root / "test_rewards-1.0.dist-info"
    about.mkdir()
    (root / "test_rewards.py").write_text(REWARDS)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: test-rewards\nVersion: 1.0\nRequires-Dist: rlhf-host>=1,<2\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    (about / "RECORD").write_text("test_rewards.py,,\n")
    return root


@pytest.fixture(scope="session")
def rlhf(reward_plugins: Path) -> CommandLine:
    path = os.pathsep.join(filter(None, [str(reward_plugins), os.environ.get("PYTHONPATH", "")]))
    return CommandLine({**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "COLUMNS": "120"})


@pytest.fixture
def small_run(tiny_model: Path, prompts: Path) -> Sequence[str | Path]:
    """Flags of a run that takes seconds: 4 prompts × 4 samples × 8 tokens."""
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
            "--actor.lr",
            "1e-3",
        ),
        *("--rollout.n", "4", "--rollout.max-new-tokens", "8", "--train.batch-size", "4", "--train.threads", "1"),
    ]


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def rlhf_here(reward_plugins: Path, monkeypatch: pytest.MonkeyPatch):
    """The same commands in this process, where starting costs nothing."""
    from click.testing import CliRunner

    from rlhf_host.cli.main import main

    monkeypatch.syspath_prepend(str(reward_plugins))
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: CliRunner().invoke(main, [str(argument) for argument in arguments])
