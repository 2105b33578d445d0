"""Files that a run leaves: as many bytes as it said before, the final weights once, and the checkpoints that people expect."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from rlhf_host.config.schema import CheckpointConfig
from rlhf_host.training.disk import at_most

PPO = ["--algo", "ppo", "--critic.lr", "1e-3"]
LORA = ["--algo", "rloo", "--actor.lora.rank", "4"]


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def train(rlhf_here, model: Path, *flags: str) -> str:
    start = ["train", "--reward", "math_verifier", "--model", model, "--data", "arithmetic", "--run-dir", "run"]
    small = ["--batch-size", "2", "--n", "2", "--max-new-tokens", "4", "--steps", "3", "--train.threads", "1"]
    done = rlhf_here(*start, *small, *flags)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("flags", [["--algo", "rloo"], PPO, LORA], ids=["weights", "critic", "adapter"])
def test_a_checkpoint_is_as_large_as_was_said(flags, rlhf_here, tmp_path, monkeypatch):
    """The quickstart's model, whose weights outweigh names and tokenizer."""
    monkeypatch.chdir(tmp_path)
    output = train(rlhf_here, "quickstart", *flags)
    told = re.search(r"^checkpoints: ([\d.]+) MB each, at most 3 at a time; [\d.]+ GB are free in \S+$", output, re.M)
    assert told is not None, output
    (checkpoint,) = Path("run/checkpoints").glob("step-*")
    parts = sum(size(checkpoint / part) for part in ("model", "roles", "optimizers"))
    assert float(told[1]) == pytest.approx(parts / 1e6, rel=0.1, abs=0.1)


def test_the_final_weights_are_there_once_and_other_files_may_be_edited(rlhf_here, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(rlhf_here, tiny_model, "--algo", "rloo", "--checkpoint.every", "1")
    (checkpoint,) = Path("run/checkpoints").glob("step-*")
    assert checkpoint.name == "step-000003"
    weights = [Path("run/model/model.safetensors"), checkpoint / "model/model.safetensors"]
    assert os.path.samefile(*weights)
    Path("run/model/config.json").write_text("{}")
    again = rlhf_here("train", "--resume", "run", "--steps", "4")
    assert again.exit_code == 0, again.output
    assert not weights[1].exists()
    assert Path("run/model/model.safetensors").stat().st_nlink == 2


def test_without_links_there_are_copies(rlhf_here, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def refused(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refused)
    train(rlhf_here, tiny_model, "--algo", "rloo")
    assert Path("run/model/model.safetensors").stat().st_nlink == 1
    shutil.rmtree("run/checkpoints")
    assert Path("run/model/model.safetensors").stat().st_size > 1000


@pytest.mark.parametrize(
    ("keep", "left"), [([], [3]), (["--checkpoint.keep", "2"], [2, 3]), (["--checkpoint.keep", "0"], [1, 2, 3])]
)
def test_what_stays_when_a_run_has_finished(keep, left, rlhf_here, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(rlhf_here, tiny_model, "--algo", "rloo", "--checkpoint.every", "1", *keep)
    assert sorted(int(path.name[-6:]) for path in Path("run/checkpoints").glob("step-*")) == left


@pytest.mark.parametrize(
    ("settings", "steps", "count"),
    [
        ({}, 200, 3),
        ({"every": 0}, 200, 2),
        ({"every": 0, "final": False}, 200, 2),  # one that fails or is interrupted writes one
        ({"keep": 1}, 200, 2),
        ({"keep": 0}, 200, 12),
        ({"keep": 0, "every": 30}, 200, 8),
        ({"best": "eval/pass@1"}, 200, 4),
        ({"best": "reward/mean", "keep": 0}, 200, 202),
    ],
)
def test_how_many_there_are_at_a_time(settings, steps, count):
    assert at_most(CheckpointConfig(**settings), steps) == count
