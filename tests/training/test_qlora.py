"""Runs that train adapters over weights in 4 bits: engines get what is trained, and every command reads what is written."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from .test_lora import LORA, RAY, curve, ok, online, pairs

__all__ = ["online", "pairs"]
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

QLORA = (*LORA[:-2], "--actor.quantize", "4bit")


def test_a_resumed_run_is_the_run_that_was_never_stopped(rlhf_here, online, tiny_model, tmp_path):
    flags = [*online, *QLORA, "--actor.model", tiny_model, "--checkpoint.every", "2", "--checkpoint.keep", "0"]
    ok(rlhf_here(*flags, "--run-dir", tmp_path / "whole"))
    rows = curve(tmp_path / "whole")
    assert max(row["mismatch/max"] for row in rows) < 1e-4
    assert rows[0]["kl"] == 0.0  # the same module without its adapter
    assert abs(rows[-1]["kl"]) > 1e-4
    ok(rlhf_here(*flags, "--train.steps", "2", "--run-dir", tmp_path / "cut"))
    ok(rlhf_here("train", "--resume", tmp_path / "cut", "--train.steps", "4"))
    assert curve(tmp_path / "cut") == rows
    first, second = (load_file(tmp_path / run / "model/adapter_model.safetensors") for run in ("whole", "cut"))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    changed = rlhf_here("train", "--resume", tmp_path / "cut", "--train.steps", "5", "--actor.quantize", "null")
    assert (changed.exit_code, "start a new run" in changed.output) == (2, True)
    model = tmp_path / "whole/model"
    printed = ok(rlhf_here("merge-lora", model, "--output", tmp_path / "merged"))
    assert "float32, logits differ by at most" in printed
    again = [*online, "--actor.lr", "1e-2", "--kernels", "none", "--train.steps", "1", "--actor.model"]
    ok(rlhf_here(*again, model, "--run-dir", tmp_path / "adapter"))
    ok(rlhf_here(*again, tmp_path / "merged", "--run-dir", tmp_path / "from-merged"))
    adapter, merged = (curve(tmp_path / run)[0] for run in ("adapter", "from-merged"))
    assert merged["reward/mean"] == adapter["reward/mean"]


def test_the_base_in_4_bits_is_the_reference(rlhf_here, pairs, tiny_model, tmp_path):
    common = ["train", "--algo", "dpo", *QLORA, "--actor.model", tiny_model, "--data", pairs, "--train.batch-size", "10"]
    ok(rlhf_here(*common, "--run-dir", tmp_path / "view"))
    ok(rlhf_here(*common, "--reference.device", "cpu", "--actor.device", "auto", "--run-dir", tmp_path / "copy"))
    ok(rlhf_here(*common, "--reference.precompute", "true", "--run-dir", tmp_path / "before"))
    rows = curve(tmp_path / "view")
    assert rows[0]["loss"] == pytest.approx(0.693147, abs=1e-6)
    for other in ("copy", "before"):
        assert [row["loss"] for row in curve(tmp_path / other)] == pytest.approx([row["loss"] for row in rows], abs=1e-6)


def test_a_critic_keeps_whole_weights_unless_it_trains_adapters_too(rlhf_here, tiny_model, prompts, tmp_path):
    flags = ["train", "--algo", "ppo", "--reward", "vowels", "--data", prompts, "--rollout.max-new-tokens", "8", *QLORA]
    flags += ["--actor.model", tiny_model, "--train.batch-size", "4", "--train.steps", "2"]
    ok(rlhf_here(*flags, "--run-dir", tmp_path / "whole"))
    assert (tmp_path / "whole/checkpoints/step-000002/roles/critic/model.safetensors").is_file()
    more = ["--critic.lora.rank", "4", "--critic.quantize", "4bit"]
    ok(rlhf_here(*flags, *more, "--run-dir", tmp_path / "adapter"))
    assert curve(tmp_path / "adapter")[0]["critic/loss"] == pytest.approx(curve(tmp_path / "whole")[0]["critic/loss"], rel=1e-3)
    refused = rlhf_here(*flags, "--critic.quantize", "4bit", "--run-dir", tmp_path / "refused")
    assert (refused.exit_code, "add --critic.lora.rank 16" in refused.output) == (2, True)


def test_on_ray_engines_get_merged_weights(rlhf, online, tiny_model, tmp_path):
    pytest.importorskip("ray")
    flags = [*online, *QLORA, "--actor.model", tiny_model, "--sync.verify", "on", "--train.steps", "3"]
    place = ("--placement", "actor+reference=2", "--placement", "rollout=1")
    rlhf.run(*flags, *RAY, *place, "--run-dir", tmp_path / "ray")
    rows = curve(tmp_path / "ray")
    assert max(row["mismatch/max"] for row in rows) < 1e-4
    assert (rows[0]["kl"], rows[-1]["version"]) == (0.0, 3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--actor.lora.rank", "0"], "trains all its weights, which 4 bits cannot hold: add --actor.lora.rank 16"),
        (["--engine", "vllm", "--sync.adapter", "adapter"], "engines have the base as it was before it was quantized"),
        (["--actor.quantize", "3bit"], "actor.quantize"),
    ],
)
def test_what_cannot_be(flags, message, rlhf_here, online, tiny_model, tmp_path):
    if "vllm" in flags:
        pytest.importorskip("vllm")
    result = rlhf_here(*online, *QLORA, "--actor.model", tiny_model, *flags, "--run-dir", tmp_path / "run")
    assert (result.exit_code, message in result.output) == (2, True), result.output
