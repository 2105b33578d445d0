"""Experts whose tokens are exchanged compute as a family's own code, with its gradients: by one rank, which is sent all of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from rlhf_backend_fsdp.experts import expert_layers, expert_mesh, keep_own
from torch.distributed.device_mesh import init_device_mesh

from rlhf_host.errors import UserError

from .miniatures import miniature
from .test_replayed_experts import REPLAYED

SPLIT = [*REPLAYED, "deepseek_v4", "phimoe", "zaya"]
UNKNOWN = ["dbrx", "doge-moe", "jetmoe", "llama4_text", "longcat_flash"]


@pytest.fixture(scope="module")
def mesh():
    """A process alone, which exchanges tokens with itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield expert_mesh(init_device_mesh("cpu", (1,)), 1)
    dist.destroy_process_group()


def passed(model):
    """Logits, and the gradient of each weight."""
    model.zero_grad()
    logits = model(input_ids=torch.tensor([[5, 9, 3, 7, 8], [1, 2, 3, 4, 6]]), use_cache=False).logits
    logits.float().square().sum().backward()
    return logits.detach(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("name", SPLIT)
def test_a_familys_experts_give_the_same_when_tokens_are_exchanged(mesh, name):
    model = miniature(name)
    logits, gradients = passed(model)
    layers = keep_own(model, mesh)
    assert layers
    found, others = passed(model)
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5)
    assert others.keys() == gradients.keys()
    for key, value in gradients.items():
        assert float((others[key] - value).abs().max()) <= 1e-5 * float(value.abs().max()) + 1e-7, key


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_family_with_other_experts_is_refused_by_name(name):
    model = miniature(name)
    with pytest.raises(UserError, match=f"{type(model).__name__} has experts, but not by transformers' interface"):
        expert_layers(model)


def test_a_family_without_experts_has_none():
    assert expert_layers(miniature("llama")) == {}
