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
from rlhf_host.backends import OneProcess
from rlhf_host.protocols import BackendStart, TrainedModel
from rlhf_host.settings import RoleConfig


@pytest.fixture
def model(tmp_path):
    return AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path / "tiny"), dtype=torch.float32)


def start(model, **options):
    role, ranks = RoleConfig(device="cpu", lr=1e-3), OneProcess()
    return FSDP(FSDP.Options(**options)).start(
        BackendStart(model=model, compute=model, head=(), role=role, total_updates=1, ranks=ranks)
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Muon", "Muon needs whole matrices: choose --backend torch"),
        ("Adafactor", "Adafactor needs whole rows and columns"),
        ("AdamW8bit", "8 bits share a scale among neighbours"),
        ("Lion", "Lion is not one of them"),
    ],
)
def test_an_optimizer_whose_step_needs_more_than_a_piece(name, said):
    with pytest.raises(ValidationError, match=f"each process steps its own pieces of the weights.*{said}"):
        FSDP.Options(optimizer=name)


def test_arguments_of_optimizers_are_checked_before_the_run():
    needs = Needs(data="prompts", roles=(RoleNeed("actor", trainable=True, source=None),))
    begin = SimpleNamespace(needs=needs, roles={"actor": RoleConfig()})
    FSDP(FSDP.Options(optimizer="SGD", optimizer_args=["momentum=0.9"])).check(begin, {})
    with pytest.raises(UserError, match="optimizer_args momentun: SGD takes momentum"):
        FSDP(FSDP.Options(optimizer="SGD", optimizer_args=["momentun=0.9"])).check(begin, {})


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
    roles = {
        each: RoleConfig().model_copy(update={"quantize": "nf4" if each == name else None}) for each in ("actor", "reference")
    }
    begin, plugin = SimpleNamespace(needs=needs, roles=roles), FSDP(FSDP.Options())
    if name == "reference":
        plugin.check(begin, {})
        return
    with pytest.raises(UserError, match="cannot split weights in 4 bits: choose --backend torch, or leave quantize out"):
        plugin.check(begin, {})


def test_in_a_pass_there_is_room_for_a_ranks_own_experts_alone():
    numbers = {"trained": 1000, "trained_block": 400, "trained_outside": 200, "trained_experts": 320}
    sizes = {"frozen": 0, "frozen_bytes": 0.0, "block": 400, "outside": 200, "experts": 320, "processes": 4}
    model = TrainedModel(**numbers, **sizes, device="cpu")
    whole, split = (FSDP(FSDP.Options(expert_parallel=count)).memory(model).gathered for count in (1, 4))
    # Of the weights of two blocks, and of the gradients of one, of which there are two copies.
    assert whole - split == (2 * 4 + 4 + 4) * 320 * 3 / 4
    with pytest.raises(UserError, match="expert_parallel 3 does not divide the 4 ranks"):
        FSDP(FSDP.Options(expert_parallel=3)).memory(model)


def test_options_that_are_unknown():
    for wrong in ({"precision": "fp16"}, {"shard": 0}, {"expert_parallel": 0}, {"zero_stage": 3}):
        with pytest.raises(ValidationError):
            FSDP.Options(**wrong)
