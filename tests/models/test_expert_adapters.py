"""Adapters of experts that are one tensor: computed, merged, saved and read as peft does, and as the formula says."""

from __future__ import annotations

import json

import peft
import pytest
import torch
from rlhf_authoring.models import tiny_tokenizer
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from rlhf_host.backends import OneProcess
from rlhf_host.backends.weights import adapter_buckets, named_weights
from rlhf_host.config.schema import LoraOptions
from rlhf_host.distributed.deepspeed.plugin import DeepSpeed
from rlhf_host.distributed.deepspeed.setup import refuse_splits
from rlhf_host.errors import UserError
from rlhf_host.models import load_model, save_model
from rlhf_host.models.adapters import adapter_layers, attach, expert_tensors, fold, using
from rlhf_host.settings import RoleConfig

from .miniatures import miniature

IDS = torch.tensor([[5, 6, 7, 10, 11, 12, 9, 8]])
FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "nemotron_h", "granitemoe"]
"""Plain ones; one with dense layers and shared experts; transposed and with biases; without a gate; with another layer's name."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path, tokenizer = tmp_path_factory.mktemp("experts"), tiny_tokenizer()
    config = MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, vocab_size=len(tokenizer), max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    MixtralForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def learn(model):
    """Gives every ``B`` values, as training does."""
    generator = torch.Generator().manual_seed(1)
    for _, layer in adapter_layers(model):
        layer.lora_B["trained"].weight.data.normal_(std=0.1, generator=generator)


def of(model):
    return model(input_ids=IDS, use_cache=False).logits


def role(path, **lora):
    return RoleConfig(model=str(path), device="cpu", lora={"rank": 3, "targets": ["experts"], **lora})


@pytest.mark.parametrize("names", [["experts"], ["all-linear", "experts"], ["experts.down_proj"]], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_experts_are_trained_and_merged(family, names):
    model, whole = (miniature(family).float().eval() for _ in range(2))
    plain = of(model)
    names = [name for name in names if (family, name) != ("nemotron_h", "all-linear")]  # peft refuses Mamba layers
    names = [name if family != "nemotron_h" or "." not in name else "experts.up_proj" for name in names]
    attach(model, LoraOptions(rank=3, targets=names), "base")
    wrapped = [name for name, layer in adapter_layers(model) if hasattr(layer, "parameter_name")]
    assert len(wrapped) == len(expert_tensors(whole, names)) > 0
    torch.testing.assert_close(of(model), plain)
    learn(model)
    logits = of(model)
    assert not torch.allclose(logits, plain, atol=1e-3)
    logits.square().sum().backward()
    for _, layer in adapter_layers(model):
        for part in (layer.lora_A, layer.lora_B):
            assert part["trained"].weight.grad.abs().sum() > 0
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert all(".lora_" in name for name in trained)
    weights = dict(named_weights(model))
    assert weights.keys() == dict(whole.state_dict()).keys()
    whole.load_state_dict(weights)
    torch.testing.assert_close(of(whole), logits, rtol=1e-4, atol=1e-4)
    with using(None, model):
        torch.testing.assert_close(of(model), plain)
    fold(model)
    torch.testing.assert_close(of(model), logits, rtol=1e-4, atol=1e-4)
    assert not [name for name, _ in model.named_modules() if "base_layer" in name]


def test_each_expert_has_the_product_of_its_own_factors():
    """``y = W x + s·B(A x)``, expert by expert, in float64."""
    model = miniature("qwen3_moe").eval()
    experts = model.model.layers[0].mlp.experts
    up, down = experts.gate_up_proj.detach().double(), experts.down_proj.detach().double()
    attach(model, LoraOptions(rank=3, alpha=5, targets=["experts"]), "base")
    learn(model)
    model.double().set_experts_implementation("eager")
    outer = model.model.layers[0].mlp.experts
    wrappers = {outer.parameter_name: outer, outer.base_layer.parameter_name: outer.base_layer}
    count = len(up)

    def product(name, weight, expert, x):
        a, b = (part["trained"].weight for part in (wrappers[name].lora_A, wrappers[name].lora_B))
        own_a, own_b = a.view(count, 3, -1)[expert], b.view(b.shape[0], 3, count)[..., expert]
        return weight[expert] @ x + 5 / 3 * (own_b @ (own_a @ x))

    torch.manual_seed(2)
    x, chosen = torch.randn(6, 32, dtype=torch.float64), torch.tensor([[0, 1], [1, 2], [3, 0], [2, 3], [1, 3], [0, 2]])
    gates = torch.rand(6, 2, dtype=torch.float64)
    expected = torch.zeros_like(x)
    for token in range(6):
        for place, expert in enumerate(chosen[token].tolist()):
            gate, value = product("gate_up_proj", up, expert, x[token]).chunk(2)
            one = product("down_proj", down, expert, torch.nn.functional.silu(gate) * value)
            expected[token] += gates[token, place] * one
    torch.testing.assert_close(outer(x, chosen, gates), expected)


def test_it_is_saved_and_read_as_peft_does(base, tmp_path):
    model = load_model(role(base, targets=["all-linear", "experts"]), trainable=True)
    learn(model)
    save_model(model, tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert settings["target_parameters"] == ["experts.down_proj", "experts.gate_up_proj"]
    with torch.no_grad():
        own = of(model)
        again = load_model(RoleConfig(model=str(base), adapter=str(tmp_path / "adapter"), device="cpu"), trainable=True)
        assert torch.equal(of(again), own)
        merged = load_model(RoleConfig(model=str(base), adapter=str(tmp_path / "adapter"), device="cpu"))
        torch.testing.assert_close(of(merged), own, rtol=1e-4, atol=1e-5)
        theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter").eval()
        torch.testing.assert_close(of(theirs), own, rtol=1e-5, atol=1e-6)


def test_an_adapter_of_peft_is_read(base, tmp_path):
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj"], target_parameters=["experts.down_proj", "mlp.experts.gate_up_proj"]
    )
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()
    for name, weight in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    theirs.save_pretrained(tmp_path)
    own = load_model(RoleConfig(model=str(base), adapter=str(tmp_path), device="cpu"), trainable=True)
    with torch.no_grad():
        torch.testing.assert_close(of(own), of(theirs), rtol=1e-5, atol=1e-6)


def test_what_experts_adapters_cannot_have_is_refused(base, tmp_path):
    with pytest.raises(UserError, match=r"lora.dropout 0.1: model.layers.0.mlp.experts has an adapter of experts"):
        load_model(role(base, dropout=0.1), trainable=True)
    with pytest.raises(UserError, match=r"no linear map 'gate_up_proj'; did you mean 'experts.gate_up_proj'"):
        load_model(role(base, targets=["gate_up_proj"]), trainable=True)
    model = load_model(role(base), trainable=True)
    with pytest.raises(UserError, match=r"sync.adapter is adapter, and model.layers.0.mlp.experts has one of experts"):
        list(adapter_buckets(model, 1000))
    with pytest.raises(UserError, match=r"zero_stage 3 does not train model.layers.0.mlp.experts, an adapter of experts"):
        refuse_splits(DeepSpeed.Options(zero_stage=3), OneProcess(), model)
    refuse_splits(DeepSpeed.Options(zero_stage=2), OneProcess(), model)
    save_model(model, tmp_path / "adapter")
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rank_pattern": {"experts": 9}}))
    with pytest.raises(UserError, match="uses rank_pattern beside target_parameters"):
        load_model(RoleConfig(model=str(base), adapter=str(tmp_path / "adapter"), device="cpu"), trainable=True)
