"""Adapters over weights in 4 bits: gradients are those over the widened weights, and what is sent or written computes the same."""

from __future__ import annotations

import json

import pytest
import torch

from rlhf_host.backends.weights import named_weights
from rlhf_host.config.schema import LoraOptions, RoleConfig
from rlhf_host.errors import UserError
from rlhf_host.models.adapter_files import quantized_base
from rlhf_host.models.adapters import adapter_layers
from rlhf_host.models.loading import load_model, load_tokenizer, save_model
from rlhf_host.models.passes import Passes
from rlhf_host.runtimes.building import save_for_engine

from .miniatures import miniature

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

PROMPTS = [[5, 6, 7], [5, 6, 7], [8, 9]]
IDS = torch.tensor([[10, 11, 12], [13, 14, 15], [16, 17, 0]])
MASK = torch.tensor([[True, True, True], [True, True, True], [True, True, False]])


def qlora(model, **settings) -> RoleConfig:
    return RoleConfig(model=str(model), quantize="4bit", lora=LoraOptions(rank=4, **settings))


def learn(model):
    draw = torch.Generator().manual_seed(5)
    for _, layer in adapter_layers(model):
        layer.lora_B["trained"].weight.data.normal_(0, 0.1, generator=draw)
    return model


def logprobs(model):
    return Passes(model).forward(PROMPTS, IDS, MASK).logprobs


def plain(tiny_model, model):
    """A model of ordinary weights that are what a sync would bring."""
    twin = load_model(RoleConfig(model=str(tiny_model), dtype="float32"))
    weights = dict(named_weights(model))
    assert {name: tensor.shape for name, tensor in weights.items()} == {n: t.shape for n, t in twin.state_dict().items()}
    twin.load_state_dict(weights)
    return twin


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj"]])
def test_what_is_sent_computes_the_same(tiny_model, targets):
    model = learn(load_model(qlora(tiny_model, targets=targets), trainable=True))
    base = load_model(RoleConfig(model=str(tiny_model)))
    with torch.no_grad():
        own, sent, off = logprobs(model), logprobs(plain(tiny_model, model)), Passes(model).under(None)
        assert (own - sent).abs().max() < 1e-5
        rounded = (off.forward(PROMPTS, IDS, MASK).logprobs - logprobs(base)).abs().max()
    assert 1e-4 < rounded < 0.5  # it is in 4 bits, and still the model
    assert (
        sum(p.nbytes for p in model.model.layers.parameters() if not p.requires_grad)
        < base.model.layers[0].mlp.up_proj.weight.nbytes * 14 / 6
    )


def test_gradients_are_those_over_the_same_weights_widened(tiny_model, tmp_path):
    """In evaluation mode, in which every pass runs, bitsandbytes would compute others on CPUs."""
    model = learn(load_model(qlora(tiny_model), trainable=True))
    for layer in adapter_layers(model):
        layer[1].lora_B["trained"].weight.data.zero_()
    widened = plain(tiny_model, model)
    widened.save_pretrained(tmp_path / "widened")
    load_tokenizer(RoleConfig(model=str(tiny_model))).save_pretrained(tmp_path / "widened")
    twin = load_model(RoleConfig(model=str(tmp_path / "widened"), lora=LoraOptions(rank=4)), trainable=True)
    gradients = []
    for each in (learn(model), learn(twin)):
        logprobs(each)  # a pass before does not change what follows
        logprobs(each)[MASK].sum().backward()
        gradients.append({name: w.grad for name, w in each.named_parameters() if w.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert (gradient - gradients[1][name]).abs().max() <= 1e-5 * gradients[1][name].abs().max(), name


def test_what_is_written_says_so_and_loads_as_what_was_trained(tiny_model, tmp_path):
    model = learn(load_model(qlora(tiny_model), trainable=True))
    save_model(model, tmp_path / "adapter")
    assert quantized_base(tmp_path / "adapter") == "4bit"
    frozen = load_model(RoleConfig(model=str(tmp_path / "adapter"), dtype="float32"))
    again = load_model(RoleConfig(model=str(tiny_model), adapter=str(tmp_path / "adapter")), trainable=True)
    with torch.no_grad():
        assert (logprobs(frozen) - logprobs(model)).abs().max() < 1e-5
        assert torch.equal(logprobs(again), logprobs(model))
    frozen.save_pretrained(tmp_path / "merged")
    with torch.no_grad():
        assert torch.equal(logprobs(load_model(RoleConfig(model=str(tmp_path / "merged")))), logprobs(frozen))


def test_a_scalar_head_stays_as_it_is(tiny_model):
    model = load_model(qlora(tiny_model), head="scalar", trainable=True)
    assert (type(model.score), model.score.weight.dtype, model.score.weight.requires_grad) == (
        torch.nn.Linear,
        torch.float32,
        True,
    )


def test_a_frozen_model_is_quantized_too(tiny_model):
    model = load_model(RoleConfig(model=str(tiny_model), quantize="4bit", dtype="float32"))
    with torch.no_grad():
        assert (logprobs(model) - logprobs(plain(tiny_model, model))).abs().max() < 1e-5


def test_maps_of_another_kind_are_refused(tmp_path):
    miniature("gpt2").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"GPT2LMHeadModel cannot be in 4 bits: \S+ is a Conv1D, not a Linear"):
        load_model(RoleConfig(model=str(tmp_path), quantize="4bit"))


def test_without_bitsandbytes_the_extra_is_named(tiny_model, monkeypatch):
    monkeypatch.setattr("rlhf_host.plugins.libraries._is_there", lambda library: library != "bitsandbytes")
    with pytest.raises(UserError, match=r"weights in 4 bits need bitsandbytes: pip install 'rlhf-host\[bitsandbytes\]'"):
        load_model(qlora(tiny_model), trainable=True)


@pytest.mark.parametrize("with_weights", [True, False])
def test_an_engine_with_weights_of_its_own_gets_ordinary_ones(tiny_model, tmp_path, with_weights):
    model = load_model(RoleConfig(model=str(tiny_model), quantize="4bit", dtype="float32"))
    tokenizer = load_tokenizer(RoleConfig(model=str(tiny_model)))
    save_for_engine(model, tokenizer, tmp_path, with_weights=with_weights)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    if with_weights:
        with torch.no_grad():
            sent = logprobs(load_model(RoleConfig(model=str(tmp_path))))
            assert (sent - logprobs(model)).abs().max() < 1e-5  # and the model is as it was
