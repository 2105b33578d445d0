"""Runs on Ray whose two workers split every weight by FSDP2, through the real command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("ray")

pytestmark = pytest.mark.timeout(900)

RAY = ("--runtime", "ray", "--ray.num-cpus", "4", "--ray.num-gpus", "0", "--ray.object-store-mb", "200")
SPLIT = ("--backend", "fsdp", "--placement", "actor=2", "--placement", "rollout=1")
NAMES = ("reward/mean", "tokens", "loss", "grad_norm", "lr", "version", "rollout/groups", "entropy")


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "more",
    [(), ("--algo", "ppo"), ("--actor.lora.rank", "4", "--kl.coef", "0.1")],
    ids=["rloo", "ppo", "lora"],
)
def test_two_ranks_train_as_one_process_does_and_resume(rlhf, small_run, tmp_path, more):
    common = [*small_run, *more, "--actor.adam-eps", "1e-4", "--checkpoint.every", "2", "--train.steps", "3"]
    rlhf.run(*common, "--run-dir", tmp_path / "local")
    rlhf.run(*common, *RAY, *SPLIT, "--run-dir", tmp_path / "split")
    whole, split = metrics(tmp_path / "local"), metrics(tmp_path / "split")
    print([row["mismatch/max"] for row in split])
    assert ("critic/grad_norm" in split[0]) == ("ppo" in more)
    assert ("kl" in split[0]) == ("--kl.coef" in more)
    assert [row["step"] for row in split] == [row["step"] for row in whole] == [1, 2, 3]
    for one, two in zip(whole, split, strict=True):
        assert two["mismatch/max"] < 1e-4, "the engine has the weights that the two hold"
        for name in NAMES:
            assert two.get(name) == pytest.approx(one.get(name), rel=1e-3, abs=1e-5), name
    # Another number of ranks takes it up.
    rlhf.run(
        "train", "--resume", tmp_path / "split", "--train.steps", "4", "--placement", "actor=1", "--placement", "rollout=1"
    )
    rlhf.run("train", "--resume", tmp_path / "local", "--train.steps", "4")
    here, there = metrics(tmp_path / "local")[-1], metrics(tmp_path / "split")[-1]
    assert there["step"] == 4
    assert there["grad_norm"] == pytest.approx(here["grad_norm"], rel=1e-2)
