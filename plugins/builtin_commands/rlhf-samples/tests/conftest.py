"""A tiny model, prompts, and the command line, for which plugins of tests are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rlhf_authoring.models import write_tiny_model

from rlhf_host.commands import main

PLUGINS = '''"""Plugins for tests."""
from pydantic import BaseModel
from rlhf_host import Advantages, AlgoNeeds, Drop, LossTerm, Reward, RoleNeed, hookimpl
from rlhf_host import functional as F

class Plugin:
    class Options(BaseModel):
        pass
    def __init__(self, options):
        self.options = options

class Vowels(Plugin):
    @hookimpl
    def score(self, trajectories):
        found = [sum(c in "aeiou" for c in t.text) / 8 for t in trajectories]
        return [Reward(value, score=float(value > 0.25)) for value in found]

class Broken(Plugin):
    @hookimpl
    def score(self, trajectories):
        raise ConnectionError("the judge is down")

class Picky(Plugin):
    """Cannot judge the first sample of every group."""
    @hookimpl
    def score(self, trajectories):
        return [None if t.sample == 0 else float(len(t.text)) for t in trajectories]

class Baseline(Plugin):
    """The mean of the group's other samples is the baseline."""
    @hookimpl
    def needs(self):
        return AlgoNeeds(data="prompts", roles=(RoleNeed("actor", trainable=True, source=None),), min_group_size=2)
    @hookimpl
    def compute_advantages(self, experience):
        rewards = experience.rewards
        if experience.shaped is not None:
            rewards = rewards + F.masked_sum(experience.shaped, experience.action_mask, -1)
        own = F.leave_one_out(rewards, experience.group_id, experience.episode_id)
        return Advantages(F.on_actions(own, experience.action_mask))
    @hookimpl
    def compute_loss(self, role, outputs, batch):
        yield LossTerm("baseline", -batch.advantages * outputs.logprobs)

class Differing(Plugin):
    @hookimpl
    def keep_group(self, group):
        return True if len({t.reward for t in group.trajectories}) > 1 else Drop("equal")

class Lowered(Plugin):
    """A quarter of the reward where the answer is cut off."""
    @hookimpl
    def transform_rewards(self, experience, rewards):
        return rewards.where(~experience.truncated, rewards / 4)

class Whole(Plugin):
    """Nothing of an answer that is cut off is in the loss."""
    @hookimpl
    def loss_masks(self, experience):
        return experience.action_mask & ~experience.truncated.unsqueeze(-1)
'''
KINDS = {"rewards": ("Vowels", "Broken", "Picky"), "algos": ("Baseline",), "extensions": ("Differing", "Lowered", "Whole")}
ENTRY_POINTS = "".join(
    f"[rlhf.{kind}]\n" + "".join(f"{name.lower()} = samples_plugins:{name}\n" for name in names)
    for kind, names in KINDS.items()
)


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
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that, on the path, is an installed distribution of plugins."""
    root = tmp_path_factory.mktemp("plugins")
    about = root / "samples_plugins-1.0.dist-info"
    about.mkdir()
    (root / "samples_plugins.py").write_text(PLUGINS)
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: samples-plugins\nVersion: 1.0\nRequires-Dist: rlhf-host>=0.10,<0.11\n"
    )
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    return root


@pytest.fixture
def rlhf_here(plugins: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """The command line in this process."""
    monkeypatch.syspath_prepend(str(plugins))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def rlhf_process(plugins: Path) -> Callable[..., subprocess.Popen[str]]:
    """The command line, started in a process of its own."""
    path = os.pathsep.join(filter(None, [str(plugins), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "120"}

    def start(*arguments: str | Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "rlhf_host.cli.main", *map(str, arguments)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start


@pytest.fixture
def sampling(tiny_model: Path, prompts: Path) -> list[str]:
    """Flags of a small step: 4 prompts × 4 samples × 8 tokens."""
    small = ("--rollout.n", "4", "--rollout.max-new-tokens", "8", "--train.batch-size", "4", "--train.threads", "1")
    model = ("--actor.model", str(tiny_model), "--data", str(prompts), "--actor.lr", "1e-3")
    return ["--reward", "vowels", *model, *small, "--kernels", "none"]
