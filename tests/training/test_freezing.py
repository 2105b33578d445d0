"""Weights that patterns freeze stay as they are, bit for bit; the others are trained as ever."""

from __future__ import annotations

import json

import pytest
import torch
from rlhf_authoring.models import write_tiny_model
from safetensors.torch import load_file

from rlhf_host.config.schema import RoleConfig
from rlhf_host.errors import UserError
from rlhf_host.models.loading import load_model


def trained(model, **settings):
    loaded = load_model(RoleConfig(model=str(model), **settings), trainable=True)
    return {name for name, weight in loaded.named_parameters() if weight.requires_grad}


def test_patterns_are_for_whole_names(tiny_model, tmp_path):
    everything = trained(tiny_model)
    assert trained(tiny_model, freeze=["*embed_tokens*"]) == everything - {"model.embed_tokens.weight"}
    second = {name for name in everything if ".layers.1." in name}
    assert trained(tiny_model, train_only=["*.layers.1.*"]) == second
    mlp = {name for name in second if ".mlp." in name}
    assert trained(tiny_model, train_only=["*.layers.1.*"], freeze=["*.mlp.*"]) == second - mlp
    tied = write_tiny_model(tmp_path, tied=True)
    assert "model.embed_tokens.weight" not in trained(tied, freeze=["lm_head.*"])  # the same weight by its other name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"freeze": ["embed_tokens"]}, "freeze: no weight of LlamaForCausalLM is called 'embed_tokens'"),
        ({"train_only": ["model.norm.weigth"]}, "did you mean 'model.norm.weight'"),
        ({"freeze": ["*"]}, "leave no weight to train"),
    ],
)
def test_patterns_that_cannot_be(tiny_model, settings, message):
    with pytest.raises(UserError, match=message):
        trained(tiny_model, **settings)


@pytest.mark.parametrize("kernels", ["none", "auto"])
def test_a_run_leaves_frozen_weights_alone_and_resumes(kernels, rlhf_here, small_run, tiny_model, tmp_path, caplog):
    freeze = ["--actor.freeze", "*embed_tokens*", "--actor.freeze", "*.layers.0.*", "--kernels", kernels]
    for run, steps in (("whole", "3"), ("cut", "2")):
        result = rlhf_here(*small_run, *freeze, "--train.steps", steps, "--run-dir", tmp_path / run)
        assert result.exit_code == 0, result.output
    assert "weights are trained (" in caplog.text
    assert rlhf_here("train", "--resume", tmp_path / "cut", "--train.steps", "3").exit_code == 0
    before = load_file(tiny_model / "model.safetensors")
    after, resumed = (load_file(tmp_path / run / "model/model.safetensors") for run in ("whole", "cut"))
    same = {name for name, tensor in after.items() if torch.equal(tensor, before[name])}
    assert same == {name for name in before if "embed_tokens" in name or ".layers.0." in name}
    assert all(torch.equal(tensor, after[name]) for name, tensor in resumed.items())
    rows = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    assert max(row["mismatch/max"] for row in rows) < 1e-4


def test_adapters_leave_nothing_to_freeze(rlhf_here, small_run, tmp_path):
    pytest.importorskip("peft")
    flags = ["--actor.lora.rank", "4", "--actor.freeze", "*embed*", "--run-dir", tmp_path / "run"]
    result = rlhf_here(*small_run, *flags)
    assert (result.exit_code, "all weights of the model are frozen" in result.output) == (2, True)
