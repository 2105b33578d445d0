"""Adapters over a base that training held in 16 bits: whatever loads them later rounds the base in the same way."""

from __future__ import annotations

import copy

import pytest
import torch
from rlhf_runs.merging import merge
from safetensors.torch import load_file, save_file

from rlhf_host.config.schema import LoraOptions, RoleConfig
from rlhf_host.errors import UserError
from rlhf_host.models import quantized
from rlhf_host.models.adapter_files import WEIGHTS, rounded_base
from rlhf_host.models.adapters import adapter_layers
from rlhf_host.models.loading import load_model, load_tokenizer, save_model
from rlhf_host.records.needs import Needs, RoleNeed
from rlhf_host.training.role_settings import role_settings

pytest.importorskip("peft")

IDS = torch.arange(5, 45).view(2, 20)
KINDS = [("bfloat16", None), ("float16", None), ("bfloat16", "4bit")]


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits.float()


def in_32_bits(model):
    """The model as it was trained, computed without rounding."""
    return quantized.widen(copy.deepcopy(model)).float()


@pytest.fixture(params=KINDS, ids=lambda kind: "-".join(filter(None, kind)))
def trained(request, tiny_model, tmp_path):
    """A model whose base is in 16 bits, and its adapter written to ``tmp_path/adapter``."""
    dtype, quantize = request.param
    if quantize:
        pytest.importorskip("bitsandbytes")
    role = RoleConfig(model=str(tiny_model), dtype=dtype, quantize=quantize, lora=LoraOptions(rank=4))
    model = load_model(role, trainable=True)
    draw = torch.Generator().manual_seed(5)
    for _, layer in adapter_layers(model):
        layer.lora_B["trained"].weight.data.normal_(0, 0.1, generator=draw)
    save_model(model, tmp_path / "adapter")
    load_tokenizer(role).save_pretrained(tmp_path / "adapter")
    return model


def test_a_frozen_role_and_one_that_trains_on_compute_what_was_trained(trained, tiny_model, tmp_path):
    wanted = logits(in_32_bits(trained))
    assert logits(load_model(RoleConfig(model=str(tmp_path / "adapter")))).sub(wanted).abs().max() < 1e-6
    again = load_model(RoleConfig(model=str(tiny_model), adapter=str(tmp_path / "adapter")), trainable=True)
    assert torch.equal(logits(again), logits(trained))
    assert {p.dtype for p in again.parameters()} == {p.dtype for p in trained.parameters()}


def test_it_is_merged_into_what_it_was_trained_over(trained, tmp_path):
    merged = merge(tmp_path / "adapter", None, tmp_path / "merged", None)
    written = load_model(RoleConfig(model=str(tmp_path / "merged")))
    assert merged.dtype == "float32"
    assert merged.gap < 1e-5
    assert logits(written).sub(logits(in_32_bits(trained))).abs().max() < 1e-5


def test_a_base_in_32_bits_is_not_rounded(tiny_model, tmp_path):
    model = load_model(RoleConfig(model=str(tiny_model), lora=LoraOptions(rank=4)), trainable=True)
    save_model(model, tmp_path / "adapter")
    assert rounded_base(tmp_path / "adapter") is None


def test_files_in_16_bits_stay_in_16_bits(tiny_model, tmp_path):
    base = load_model(RoleConfig(model=str(tiny_model), dtype="bfloat16"))
    base.save_pretrained(tmp_path / "base")
    model = load_model(RoleConfig(model=str(tmp_path / "base"), dtype="bfloat16", lora=LoraOptions(rank=4)), trainable=True)
    save_model(model, tmp_path / "adapter")
    assert load_model(RoleConfig(model=str(tmp_path / "adapter"))).dtype == torch.bfloat16


def test_a_type_that_is_not_known_is_refused(tiny_model, tmp_path):
    model = load_model(RoleConfig(model=str(tiny_model), dtype="bfloat16", lora=LoraOptions(rank=4)), trainable=True)
    save_model(model, tmp_path / "adapter")
    file = tmp_path / "adapter" / WEIGHTS
    save_file(load_file(file), file, metadata={"base_dtype": "fp8"})
    message = "base_dtype in its metadata is 'fp8', and must be one of float32, bfloat16, float16"
    with pytest.raises(UserError, match=message):
        load_model(RoleConfig(model=str(tmp_path / "adapter")))


@pytest.mark.parametrize(
    ("actor", "reference", "dtype"),
    [
        ("bfloat16", "auto", "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("float32", "auto", "auto"),
        ("auto", "auto", "auto"),
    ],
)
def test_a_reference_that_is_loaded_apart_is_rounded_as_the_actor(tiny_model, actor, reference, dtype):
    roles = {
        "actor": RoleConfig(model=str(tiny_model), dtype=actor, lora=LoraOptions(rank=4)),
        "reference": RoleConfig(dtype=reference),
    }
    need = RoleNeed("reference", source="actor")
    assert role_settings(roles, need, None, Needs()).dtype == dtype
    assert role_settings(roles, RoleNeed("critic", source="actor", trainable=True), None, Needs()).dtype == "auto"
