"""A run on Ray whose workers split every layer between them, through the real command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

pytest.importorskip("ray")
pytest.importorskip("deepspeed")

pytestmark = pytest.mark.timeout(900)

RAY = ("--runtime", "ray", "--ray.num-cpus", "4", "--ray.num-gpus", "0", "--ray.object-store-mb", "200")
SPLIT = ("--backend", "deepspeed", "--backend.zero-stage", "1", "--backend.autotp-size", "2")


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_two_workers_that_split_every_layer_train_as_one_process_does_and_resume(rlhf, small_run, tmp_path):
    common = [*small_run, "--actor.adam-eps", "1e-4", "--checkpoint.every", "2", "--train.steps", "3"]
    rlhf.run(*common, "--run-dir", tmp_path / "local")
    rlhf.run(*common, *RAY, *SPLIT, "--placement", "actor=2", "--placement", "rollout=1", "--run-dir", tmp_path / "split")
    whole, split = metrics(tmp_path / "local"), metrics(tmp_path / "split")
    assert [row["step"] for row in split] == [row["step"] for row in whole]
    for one, two in zip(whole, split, strict=True):
        assert two["mismatch/max"] < 1e-4, "the engine has the weights that the two hold"
        for name in ("reward/mean", "tokens", "loss", "grad_norm", "lr", "version", "rollout/groups", "entropy"):
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "local" / "model").state_dict()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "split" / "model").state_dict()
    assert all((saved[name] - value).norm() <= 1e-4 * value.norm() for name, value in expected.items())

    rlhf.run("train", "--resume", tmp_path / "split", "--train.steps", "4")
    assert [row["step"] for row in metrics(tmp_path / "split")][-1] == 4


def test_devices_that_do_not_come_out_even_are_refused_before_anything_starts(rlhf, small_run, tmp_path):
    flags = (*RAY, *SPLIT, "--placement", "actor=3", "--placement", "rollout=1", "--run-dir", tmp_path / "run")
    refused = rlhf.run(*small_run, *flags, code=2)
    assert "placement actor=3: backend 'deepspeed' splits every model over 2 devices" in refused.stderr
    assert "ask for a multiple of 2" in refused.stderr
    assert not (tmp_path / "run").exists()
