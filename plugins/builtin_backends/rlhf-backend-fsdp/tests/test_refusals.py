"""Roles that cannot be split are refused by name, before they train."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from rlhf_authoring import write_tiny_model
from rlhf_backend_fsdp import FSDP
from transformers import AutoModelForCausalLM

from rlhf_host import Needs, RoleNeed, UserError
from rlhf_host.internals import Ranks
from rlhf_host.protocols import BackendStart
from rlhf_host.settings import RoleConfig


@pytest.fixture
def model(tmp_path):
    return AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path / "tiny"), dtype=torch.float32)


def start(model, **options):
    role, ranks = RoleConfig(device="cpu", lr=1e-3), Ranks()
    return FSDP(FSDP.Options(**options)).start(
        BackendStart(model=model, compute=model, head=(), role=role, total_updates=1, ranks=ranks)
    )


def test_a_model_without_named_blocks(model):
    model._no_split_modules = None
    with pytest.raises(UserError, match=r"LlamaForCausalLM names no blocks .*_no_split_modules.*: choose --backend deepspeed"):
        start(model)


def test_a_weight_that_two_blocks_share(model):
    first, second = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    with pytest.raises(
        UserError, match=r"layers\.0\.mlp\.up_proj\.weight and model\.layers\.1\.mlp\.up_proj\.weight are one weight"
    ):
        start(model)


def test_more_ranks_of_a_copy_than_there_are(model):
    with pytest.raises(UserError, match=r"backend\.shard 2 does not divide the 1 ranks"):
        start(model, shard=2)


@pytest.mark.parametrize("name", ["actor", "reference"])
def test_a_base_in_4_bits_that_is_trained(name):
    needs = Needs(data="prompts", roles=(RoleNeed("actor", trainable=True, source=None), RoleNeed("reference")))
    roles = {each: SimpleNamespace(quantize="nf4" if each == name else None) for each in ("actor", "reference")}
    begin, plugin = SimpleNamespace(needs=needs, roles=roles), FSDP(FSDP.Options())
    if name == "reference":
        plugin.check(begin, {})
        return
    with pytest.raises(UserError, match="cannot split weights in 4 bits: choose --backend torch, or leave quantize out"):
        plugin.check(begin, {})


def test_options_that_are_unknown():
    for wrong in ({"precision": "fp16"}, {"shard": 0}, {"zero_stage": 3}):
        with pytest.raises(ValidationError):
            FSDP.Options(**wrong)
