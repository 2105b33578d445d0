"""Runs on Ray whose rows are computed by two workers together, through the real command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

pytest.importorskip("ray")

pytestmark = pytest.mark.timeout(900)

RAY = ("--runtime", "ray", "--ray.num-cpus", "5", "--ray.num-gpus", "0", "--ray.object-store-mb", "200")
SLICES = ("--actor.sequence-parallel", "2", "--placement", "rollout=1")


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_two_workers_of_every_row_train_as_one_process_does_and_resume(rlhf, small_run, tmp_path):
    common = [*small_run, "--actor.adam-eps", "1e-4", "--checkpoint.every", "2", "--train.steps", "3"]
    rlhf.run(*common, "--run-dir", tmp_path / "local")
    rlhf.run(*common, *RAY, *SLICES, "--placement", "actor=2", "--run-dir", tmp_path / "slices")
    whole, slices = metrics(tmp_path / "local"), metrics(tmp_path / "slices")
    for one, two in zip(whole, slices, strict=True):
        assert two["mismatch/max"] < 1e-4, "the engine has the weights that the two hold"
        for name in ("reward/mean", "tokens", "loss", "grad_norm", "lr", "version", "rollout/groups", "entropy"):
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "local" / "model").state_dict()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "slices" / "model").state_dict()
    assert all((saved[name] - value).norm() <= 1e-4 * value.norm() for name, value in expected.items())

    rlhf.run("train", "--resume", tmp_path / "slices", "--train.steps", "4")
    assert [row["step"] for row in metrics(tmp_path / "slices")][-1] == 4


@pytest.mark.parametrize(
    "more",
    [
        ("--placement", "actor+reference=4", "--kl.coef", "0.1", "--backend", "deepspeed", "--backend.zero-stage", "3"),
        ("--placement", "actor=4", "--backend", "fsdp"),
        ("--placement", "actor=2", "--actor.lora.rank", "4"),
        ("--placement", "actor+critic=2", "--algo", "ppo"),
        ("--placement", "actor+reference=2", "--kl.coef", "0.1"),
    ],
    ids=["zero-3", "fsdp", "lora", "ppo", "reference"],
)
def test_engine_and_trainer_agree(rlhf, small_run, tmp_path, more):
    rlhf.run(*small_run, *RAY, *SLICES, *more, "--train.steps", "3", "--run-dir", tmp_path / "run")
    rows = metrics(tmp_path / "run")
    assert len(rows) == 3
    assert max(row["mismatch/max"] for row in rows) < 1e-4


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ("--actor.sequence-parallel", "2"),
            "actor.sequence_parallel 2 computes each row in so many processes, and runtime local",
        ),
        ((*RAY, *SLICES, "--placement", "actor=3"), "placement actor=3: actor.sequence_parallel splits rows over 2 devices"),
        (
            (*RAY, *SLICES, "--placement", "actor=4", "--backend", "deepspeed", "--backend.autotp-size", "2"),
            "splits every model over 2 devices, and actor.sequence_parallel 2 splits its rows: leave one of them out",
        ),
        (
            (*RAY, *SLICES, "--placement", "actor+critic=4", "--algo", "ppo", "--critic.sequence-parallel", "4"),
            "ask for different numbers of them for a row (actor.sequence_parallel 2, critic.sequence_parallel 4): set one number",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(rlhf, small_run, tmp_path, flags, said):
    refused = rlhf.run(*small_run, *flags, "--run-dir", tmp_path / "run", code=2)
    assert said in " ".join(refused.stderr.split())
    assert not (tmp_path / "run").exists()
