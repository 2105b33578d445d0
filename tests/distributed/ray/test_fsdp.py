"""Runs on Ray whose two workers split every weight by FSDP2, through the real command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rlhf_authoring.models import write_tiny_model
from transformers import AutoModelForCausalLM

pytest.importorskip("ray")

pytestmark = pytest.mark.timeout(900)

RAY = ("--runtime", "ray", "--ray.num-cpus", "4", "--ray.num-gpus", "0", "--ray.object-store-mb", "200")
SPLIT = ("--backend", "fsdp", "--placement", "actor=2", "--placement", "rollout=1")
NAMES = ("reward/mean", "tokens", "loss", "grad_norm", "lr", "version", "rollout/groups", "entropy")


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "more",
    [(), ("--algo", "ppo"), ("--actor.lora.rank", "4", "--kl.coef", "0.1"), ("--kl.coef", "0.1")],
    ids=["rloo", "ppo", "lora", "reference"],
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


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """vLLM has no attention kernel for narrower heads on CPUs."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "wide", hidden=128)


@pytest.mark.parametrize(
    "more",
    [(), ("--algo", "ppo"), ("--actor.lora.rank", "4", "--kl.coef", "0.1"), ("--async-depth", "1")],
    ids=["rloo", "ppo", "lora", "ahead"],
)
def test_vllm_samples_with_the_weights_that_two_ranks_hold(rlhf, small_run, tiny_model, wide, tmp_path, more):
    pytest.importorskip("vllm")
    flags = [wide if flag == tiny_model else flag for flag in small_run]
    place = ("--engine", "vllm", "--sync.verify", "on", *RAY, *SPLIT, "--run-dir", tmp_path / "run")
    rlhf.run(*flags, *more, *place, "--train.steps", "3")
    rows = metrics(tmp_path / "run")
    compared = [row["mismatch/max"] for row in rows if "mismatch/max" in row]
    print(compared)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert len(compared) == 3 or ("--async-depth" in more and compared), "older tokens were sampled by other weights"
    assert max(compared) <= 1e-4
    assert min(row["grad_norm"] for row in rows) > 0
    assert rows[-1]["version"] == 3
    assert ("critic/grad_norm" in rows[0], "kl" in rows[0]) == ("ppo" in more, "--kl.coef" in more)
    assert max(row.get("staleness/max", 0) for row in rows) == ("--async-depth" in more)


def test_rows_of_pairs_train_two_ranks_as_one_process(rlhf, tiny_model, tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{a}+3=", "chosen": str(a + 3), "rejected": str(a) * (1 + a % 3)} for a in range(24)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["train", "--algo", "dpo", "--data", pairs, "--actor.model", tiny_model, "--actor.lr", "1e-3", "--kernels", "none"]
    flags += ["--actor.adam-eps", "1e-4", "--train.batch-size", "8", "--train.steps", "3", "--train.threads", "1"]
    rlhf.run(*flags, "--run-dir", tmp_path / "local")
    rlhf.run(*flags, *RAY, "--backend", "fsdp", "--placement", "actor=2", "--run-dir", tmp_path / "split")
    whole, split = metrics(tmp_path / "local"), metrics(tmp_path / "split")
    assert [row["step"] for row in split] == [row["step"] for row in whole] == [1, 2, 3]
    for one, two in zip(whole, split, strict=True):
        for name in ("loss", "grad_norm", "lr", "rewards/margin"):
            assert two.get(name) == pytest.approx(one.get(name), rel=1e-3, abs=1e-5), name
    expected, found = (
        AutoModelForCausalLM.from_pretrained(tmp_path / run / "model").state_dict() for run in ("local", "split")
    )
    assert all((found[name] - value).norm() <= 1e-4 * value.norm() for name, value in expected.items())
