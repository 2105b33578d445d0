"""``rlhf merge-lora``, and other commands that meet an adapter."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from rlhf_authoring.models import write_tiny_model
from transformers import AutoModelForCausalLM

from rlhf_host.config.schema import LoraOptions, RoleConfig
from rlhf_host.models.adapters import adapter_layers
from rlhf_host.models.loading import load_model, load_tokenizer, save_model

pytest.importorskip("peft")


@pytest.fixture
def adapter(tiny_model, tmp_path):
    model = load_model(RoleConfig(model=str(tiny_model), lora=LoraOptions(rank=4)), trainable=True)
    for _, layer in adapter_layers(model):
        torch.nn.init.normal_(layer.lora_B["trained"].weight, std=0.1)
    save_model(model, tmp_path / "adapter")
    load_tokenizer(RoleConfig(model=str(tiny_model))).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_the_merged_model_is_whole_and_the_gap_is_printed(rlhf_process, adapter, tiny_model):
    printed = rlhf_process.run("merge-lora", adapter).stdout
    merged = adapter.with_name("adapter-merged")
    assert printed.startswith(f"{merged}: float32, logits differ by at most ")
    assert "e-0" in printed
    model = AutoModelForCausalLM.from_pretrained(merged)
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert model.state_dict().keys() == base.state_dict().keys()
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, base.model.layers[0].mlp.up_proj.weight)
    assert (merged / "tokenizer.json").is_file()
    assert f"{merged} exists" in rlhf_process.run("merge-lora", adapter, code=2).stderr


def test_types_bases_and_what_is_no_adapter(rlhf_here, adapter, tiny_model, tmp_path):
    result = rlhf_here("merge-lora", adapter, "--dtype", "bfloat16", "--output", tmp_path / "half")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "bfloat16"
    moved = tmp_path / "moved"
    shutil.copytree(tiny_model, moved)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": "/gone"}))
    assert "no model at /gone" in rlhf_here("merge-lora", adapter, "--output", tmp_path / "a").output
    assert rlhf_here("merge-lora", adapter, "--base", moved, "--output", tmp_path / "a").exit_code == 0
    other = write_tiny_model(tmp_path / "other", seed=3)
    result = rlhf_here("merge-lora", adapter, "--base", other, "--output", tmp_path / "b")
    assert (result.exit_code, "was trained on other weights" in result.output) == (2, True)
    assert not (tmp_path / "b").exists()
    result = rlhf_here("merge-lora", tiny_model, "--output", tmp_path / "b")
    assert (result.exit_code, "has no adapter: its model is whole already" in result.output) == (2, True)


def test_an_adapter_is_evaluated_as_the_merged_model_is(rlhf_here, adapter, prompts, tmp_path):
    assert rlhf_here("merge-lora", adapter, "--output", tmp_path / "merged").exit_code == 0
    found = []
    for model in (adapter, tmp_path / "merged"):
        flags = ["--eval.data", prompts, "--reward", "vowels", "--eval.temperature", "0", "--rollout.max-new-tokens", "8"]
        result = rlhf_here("eval", "--actor.model", model, *flags, "--json")
        assert result.exit_code == 0, result.output
        found.append({name: value for name, value in json.loads(result.stdout).items() if not name.startswith("time/")})
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--actor.lora.alpha", "8"],
            "roles.actor.lora is set without a rank, and trains no adapter: give --actor.lora.rank 16",
        ),
        (["--actor.adapter", "/no/such"], "no adapter at /no/such: it has no adapter_config.json"),
        (["--actor.lora.rnk", "8"], "--actor.lora.rnk: no such flag; did you mean '--actor.lora.rank'"),
        (["--actor.lora.rank", "4", "--actor.lora.targets", "lm_head"], "lm_head is the head, whose weight is used in pieces"),
    ],
)
def test_refusals(flags, message, rlhf_here, small_run, tmp_path):
    result = rlhf_here(*small_run, *flags, "--run-dir", tmp_path / "run")
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "run/config.yaml").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--actor.lora.rank", "4"], "engine transformers samples from the trainer's own module: leave --sync.adapter out"),
        (["--engine", "vllm"], "the actor trains none: give --actor.lora.rank"),
        (
            ["--engine", "transformers", "--runtime", "ray", "--actor.lora.rank", "4"],
            "engine transformers takes no adapters: leave --sync.adapter out, and engines get merged weights",
        ),
    ],
)
def test_adapters_cannot_be_sent_to(flags, message, rlhf_here, small_run, tmp_path):
    for library in ("vllm", "ray"):
        pytest.importorskip(library)
    result = rlhf_here(*small_run, "--sync.adapter", "adapter", *flags, "--run-dir", tmp_path / "run")
    assert (result.exit_code, message in result.output) == (2, True), result.output


def test_a_run_with_adapters_is_evaluated_by_its_directory(rlhf_here, small_run, prompts, tmp_path):
    lora = ["--actor.lora.rank", "4", "--train.steps", "2", "--run-dir", tmp_path / "run"]
    assert rlhf_here(*small_run, *lora).exit_code == 0
    for where in (["--checkpoint", tmp_path / "run"], ["--actor.model", tmp_path / "run", "--reward", "vowels"]):
        result = rlhf_here("eval", *where, "--eval.data", prompts, "--rollout.max-new-tokens", "8", "--json")
        assert result.exit_code == 0, result.output


def test_an_adapter_takes_no_second_one(rlhf_here, small_run, adapter, tmp_path):
    result = rlhf_here(*small_run, "--actor.adapter", adapter, "--actor.lora.rank", "4", "--run-dir", tmp_path / "run")
    assert result.exit_code == 2
    assert f"continues to train the adapter {adapter}, so it cannot get a new one" in result.output
