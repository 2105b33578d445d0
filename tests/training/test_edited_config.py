"""A ``config.yaml`` that was edited by hand is compared with what the newest checkpoint was written with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml


@pytest.fixture(scope="module")
def finished(rlhf, tiny_model, prompts, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    model = ("--algo", "rloo", "--reward", "vowels", "--actor.model", tiny_model, "--data", prompts, "--eval.data", prompts)
    short = ("--rollout.n", "2", "--rollout.max-new-tokens", "4", "--train.batch-size", "2", "--train.steps", "1")
    rlhf.run("train", *model, *short, "--run-dir", run_dir)
    return run_dir


@pytest.fixture
def edited(finished, tmp_path):
    """Copies the run and sets a value in its ``config.yaml``."""
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir, symlinks=True)

    def edit(name, value):
        settings = yaml.safe_load((run_dir / "config.yaml").read_text())
        *path, last = name.split(".")
        part = settings
        for key in path:
            part = part[key]
        part[last] = value
        (run_dir / "config.yaml").write_text(yaml.safe_dump(settings))
        return run_dir

    return edit


ANOTHER_RUN = [("seed", 0, 5), ("data.shuffle", True, False), ("roles.actor.lora.rank", 0, 2)]


@pytest.mark.parametrize(("name", "then", "now"), ANOTHER_RUN)
def test_what_would_make_it_another_run_is_refused(rlhf, edited, name, then, now):
    run_dir = edited(name, now)
    refused = rlhf.run("train", "--resume", run_dir, "--train.steps", "2", code=2)
    assert f"{name} is {then} in {run_dir}, and cannot become {now}, as config.yaml has it: start a new run" in refused.stderr


def test_so_is_another_algorithm(rlhf, edited):
    run_dir = edited("algo", {"name": "grpo"})
    refused = rlhf.run("train", "--resume", run_dir, "--train.steps", "2", code=2)
    assert f"algo.name is rloo in {run_dir}, and cannot become grpo, as config.yaml has it" in refused.stderr


@pytest.mark.parametrize(
    ("name", "then", "now"), [("eval.seed", 0, 7), ("rollout.temperature", 1.0, 0.5), ("train.batch_size", 2, 4)]
)
def test_other_settings_are_named(rlhf, edited, name, then, now):
    run_dir = edited(name, now)
    resumed = rlhf.run("train", "--resume", run_dir, "--train.steps", "2")
    change = f"not as in the run so far: {name} {then} → {now} (config.yaml), train.steps 1 → 2"
    assert sorted(change.partition(": ")[2].split(", ")) == sorted(
        next(line for line in resumed.stderr.splitlines() if "so far" in line).split("so far: ")[1].split(", ")
    )


def test_what_was_forced_or_set_by_a_flag_is_what_the_next_resume_compares_with(rlhf, edited):
    run_dir = edited("seed", 5)
    rlhf.run("train", "--resume", run_dir, "--train.steps", "2", "--force")
    state = json.loads((run_dir / "checkpoints/step-000002/state.json").read_text())
    assert (state["config"]["seed"], state["config"]["train"]["steps"]) == (5, 2)
    resumed = rlhf.run("train", "--resume", run_dir, "--train.steps", "3")
    assert "not as in the run so far: train.steps 2 → 3\n" in resumed.stderr


def test_a_run_without_a_checkpoint_begins_again_with_what_the_file_has(rlhf, edited):
    run_dir = edited("seed", 5)
    shutil.rmtree(run_dir / "checkpoints")
    resumed = rlhf.run("train", "--resume", run_dir)
    assert "so far" not in resumed.stderr
