"""The precision of passes: that of the weights in 16 bits, else autocast's."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from rlhf_authoring.contracts.reinforce import actor, batch
from rlhf_backend_fsdp import FSDP

from rlhf_host.backends import OneProcess
from rlhf_host.internals import Role, rows_of
from rlhf_host.models import load_model
from rlhf_host.settings import TrainConfig


def role_of(precision: str, autocast: Any) -> Role:
    settings, plugin = actor(), FSDP(FSDP.Options(precision=precision))
    more: Any = {"backend": plugin, "settings": settings, "total_updates": 1, "ranks": OneProcess()}
    return Role.of("actor", load_model(settings, trainable=True), TrainConfig(autocast=autocast), **more)


def types_of(role: Role) -> dict[str, torch.dtype]:
    """Types of a block's weight and result in a pass, and of the log-probabilities."""
    types, block = {}, role.passes.compute.model.layers[0]

    def look(module: Any, inputs: Any, output: Any) -> None:
        types["weight"], types["stream"] = module.mlp.up_proj.weight.dtype, output.dtype
        types["autocast"] = torch.is_autocast_enabled("cpu")

    hook = block.register_forward_hook(look, prepend=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a layout that gives other results is one
        outputs = role.passes.forward(**rows_of(batch()))
    hook.remove()
    return types | {"logprobs": outputs.logprobs.dtype}


@pytest.mark.parametrize("autocast", ["off", "bfloat16"])
def test_weights_in_16_bits_are_used_without_autocast(autocast):
    role = role_of("bf16", autocast)
    found = types_of(role)
    assert found == {"weight": torch.bfloat16, "stream": torch.bfloat16, "autocast": False, "logprobs": torch.float32}
    assert (role.passes.exact, role.backend.exact, role.passes.one_by_one) == (False, False, False)
    assert {weight.dtype for weight in role.backend._weights.values()} == {torch.float32}


def test_weights_in_32_bits_leave_products_to_autocast():
    role = role_of("fp32", "bfloat16")
    found = types_of(role)
    assert (found["weight"], found["autocast"], found["logprobs"]) == (torch.float32, True, torch.float32)
    assert (role.passes.exact, role.backend.exact) == (False, True)


def test_on_a_cpu_the_default_is_32_bits():
    role = role_of("auto", "auto")
    assert types_of(role)["stream"] == torch.float32
    assert role.passes.exact
    assert role.backend.exact
