"""Norms in few passes: the same numbers and gradients as the written-out module, in copies too."""

from __future__ import annotations

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from rlhf_host.models.norms import RmsNorm, fuse_norms


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    return model


def test_gradients_are_those_of_finite_differences() -> None:
    x = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, weight: RmsNorm.apply(x, weight, 1e-3), (x, weight))


def test_a_model_computes_the_same_with_and_without() -> None:
    plain, fused = tiny(), tiny()
    fuse_norms(fused)
    assert all("forward" in vars(module) for module in fused.modules() if isinstance(module, LlamaRMSNorm))
    ids = torch.randint(50, (4, 9))
    for model in (plain, fused):
        model(ids).logits.square().sum().backward()
    torch.testing.assert_close(fused(ids).logits, plain(ids).logits, rtol=1e-5, atol=1e-5)
    for (name, ours), theirs in zip(fused.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
    with torch.no_grad():
        torch.testing.assert_close(fused(ids).logits, plain(ids).logits, rtol=1e-5, atol=1e-5)


def test_a_copy_of_a_model_uses_its_own_weights() -> None:
    first = tiny()
    fuse_norms(first)
    second = copy.deepcopy(first)
    with torch.no_grad():
        for module in first.modules():
            if isinstance(module, LlamaRMSNorm):
                module.weight.zero_()
    ids = torch.randint(50, (1, 5))
    assert first(ids).logits.abs().max() == 0
    torch.testing.assert_close(second(ids).logits, tiny()(ids).logits, rtol=1e-5, atol=1e-5)


def test_another_formula_and_another_precision_are_left_alone() -> None:
    class Shifted(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return (1 + self.weight) * super().forward(hidden_states)

    shifted = Shifted(8)
    fuse_norms(shifted)
    assert "forward" not in vars(shifted)
    norm = LlamaRMSNorm(8)
    fuse_norms(norm)
    assert norm(torch.randn(2, 8).bfloat16()).dtype == LlamaRMSNorm(8)(torch.randn(2, 8).bfloat16()).dtype
