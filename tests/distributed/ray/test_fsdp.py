"""Runs on Ray whose two workers split every weight by FSDP2, through the real command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rlhf_authoring.models import write_tiny_model
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

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
def experts(tmp_path_factory):
    """A mixture of experts with the tokens of the tiny model."""
    path = write_tiny_model(tmp_path_factory.mktemp("model") / "experts")
    sizes = json.loads((path / "config.json").read_text())
    config = Qwen3MoeConfig(
        **{name: sizes[name] for name in ("vocab_size", "hidden_size", "pad_token_id", "eos_token_id", "bos_token_id")},
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=2, intermediate_size=64,
        moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("more", [(), ("--actor.gradient-checkpointing", "true")], ids=["plain", "recomputed"])
def test_experts_that_two_ranks_share_train_as_whole_ones(rlhf, small_run, tiny_model, experts, tmp_path, more):
    flags = [experts if flag == tiny_model else flag for flag in small_run]
    common = [*flags, *more, "--actor.adam-eps", "1e-4", "--checkpoint.every", "2", "--train.steps", "3"]
    common += ["--with", "expert_metrics", "--actor.router-aux-loss-coef", "0.01"]
    parallel = ("--backend.expert-parallel", "2")
    rlhf.run(*common, *RAY, *SPLIT, "--run-dir", tmp_path / "whole")
    rlhf.run(*common, *RAY, *SPLIT, *parallel, "--run-dir", tmp_path / "split")
    whole, split = metrics(tmp_path / "whole"), metrics(tmp_path / "split")
    assert [row["step"] for row in split] == [row["step"] for row in whole] == [1, 2, 3]
    for one, two in zip(whole, split, strict=True):
        assert two["mismatch/max"] < 1e-4, "the engine has all experts"
        for name in (*NAMES, "experts/busiest", "experts/unused", "experts/entropy/layer_1"):
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
        print({name: (one[name], two[name]) for name in ("loss", "grad_norm", "reward/mean", "mismatch/max")})
    expected, found = (
        AutoModelForCausalLM.from_pretrained(tmp_path / run / "model").state_dict() for run in ("whole", "split")
    )
    assert all((found[name] - value).norm() <= 1e-4 * value.norm() for name, value in expected.items())
    # Four ranks take it up.
    more = ("--placement", "actor=4", "--placement", "rollout=1", "--ray.num-cpus", "6")
    rlhf.run("train", "--resume", tmp_path / "split", "--train.steps", "4", *more)
    rlhf.run("train", "--resume", tmp_path / "whole", "--train.steps", "4")
    here, there = metrics(tmp_path / "whole")[-1], metrics(tmp_path / "split")[-1]
    assert there["step"] == 4
    assert there["grad_norm"] == pytest.approx(here["grad_norm"], rel=1e-2)


@pytest.mark.parametrize("backend", [("fsdp",), ("deepspeed", "--backend.zero-stage", "2")], ids=lambda given: given[0])
def test_adapters_of_experts_train_on_two_ranks_as_on_one(rlhf, small_run, tiny_model, experts, tmp_path, backend):
    flags = [experts if flag == tiny_model else flag for flag in small_run]
    common = [*flags, "--actor.adam-eps", "1e-4", "--actor.lora.rank", "4", "--actor.lora.targets", "all-linear,experts"]
    rlhf.run(*common, "--run-dir", tmp_path / "one")
    two = ("--backend", *backend, "--placement", "actor=2", "--placement", "rollout=1")
    rlhf.run(*common, *RAY, *two, "--run-dir", tmp_path / "two")
    for one, both in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert both["mismatch/max"] < 1e-4
        for name in NAMES:
            assert both[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name


def test_a_run_that_cannot_split_its_experts_is_refused_before_it_starts(rlhf, small_run, tiny_model, experts, tmp_path):
    flags = [experts if flag == tiny_model else flag for flag in small_run]
    place = (*RAY, *SPLIT, "--run-dir", tmp_path / "run")
    said = rlhf.run(*flags, *place, "--backend.expert-parallel", "3", code=2)
    assert "expert_parallel 3 does not divide the 8 experts of Qwen3MoeForCausalLM" in said.stderr
    said = rlhf.run(*small_run, *place, "--backend.expert-parallel", "2", code=2)
    assert "splits experts, and no model of this run has any (actor): leave it out" in said.stderr
    assert not (tmp_path / "run").exists()


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
