"""Triton's own kernels against formulas in float64: values and gradients, odd sizes, every type. On a GPU or in the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rlhf_authoring import model_inputs
from rlhf_kernels_triton import ops
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

pytestmark = pytest.mark.usefixtures("triton_kernels")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
MOST = {F32: 1e-5, BF16: 1e-2, F16: 2e-3}
"""Largest relative distance from float64: rounding of what is written, and in 16 bits of what is summed too."""


def random(*shape: int, device, dtype=F32, seed=0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype).requires_grad_()


def expect_close(own, expected, most):
    for place, (one, other) in enumerate(zip(own, expected, strict=True)):
        assert one.shape == other.shape
        gap = float((one.double() - other).norm() / other.norm().clamp(min=1e-12))
        assert gap <= most, f"the output or gradient {place} differs by {gap:.1e}"


def results(function, leaves):
    """Values and gradients."""
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    pulls = [random(*one.shape, device=one.device, seed=9 + place).detach() for place, one in enumerate(outputs)]
    loss = sum((one.to(torch.promote_types(one.dtype, F32)) * pull).sum() for one, pull in zip(outputs, pulls, strict=True))
    return [one.detach() for one in outputs] + list(torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.requires_grad]))


def compare(function, formula, leaves, most):
    wide = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves]
    expect_close(results(function, leaves), results(formula, wide), most)


def normed(x, weight, offset, early):
    value = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    return (value.to(early).double() if early else value) * (weight + offset)


@pytest.mark.parametrize(("offset", "early"), [(0.0, True), (1.0, False)])
@pytest.mark.parametrize("shape", [(1, 3), (3, 7), (2, 3, 32), (70, 128), (3, 1, 2049), (2, 4096)], ids=str)
@pytest.mark.parametrize(
    "types", [(F32, F32, F32), (BF16, BF16, BF16), (F16, F16, F16), (F32, F32, BF16), (BF16, F32, F32)], ids=str
)
def test_norms(types, shape, offset, early, device):
    kind, of_weight, out = types
    leaves = random(*shape, device=device, dtype=kind), random(shape[-1], device=device, dtype=of_weight, seed=1)
    rounded = kind if early and kind != F32 else None  # where the formula rounds, its gradient is not rounded
    compare(
        lambda x, w: ops.rms_norm(x, None, w, 1e-5, offset, early, out)[0],
        lambda x, w: normed(x, w, offset, rounded),
        leaves,
        max(MOST[each] for each in types),
    )


@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 32), (70, 128), (2, 2049)], ids=str)
@pytest.mark.parametrize("types", [(F32, F32, F32), (F32, BF16, BF16), (BF16, BF16, BF16)], ids=str)
def test_norms_of_a_sum(types, shape, device):
    """The residual in float32, the branch and the result in 16 bits, as under autocast; and all in one type."""
    kind, of_branch, out = types
    leaves = [random(*shape, device=device, dtype=each, seed=place) for place, each in enumerate((kind, of_branch))]
    compare(
        lambda x, branch, w: ops.rms_norm(x, branch, w, 1e-5, 0.0, True, out)[:2],
        lambda x, branch, w: (normed(x + branch, w, 0.0, None), x + branch),
        [*leaves, random(shape[-1], device=device, seed=2)],
        max(MOST[each] for each in types),
    )


def test_the_gradient_of_one_output_alone(device):
    x, branch, w = (random(*shape, device=device, seed=len(shape)) for shape in ((3, 8), (3, 8), (8,)))
    normed_alone = torch.autograd.grad(ops.rms_norm(x, branch, w, 1e-5, 0.0, True, F32)[0].sum(), (x, branch, w))
    summed_alone = torch.autograd.grad(ops.rms_norm(x, branch, w, 1e-5, 0.0, True, F32)[1].sum(), (x, branch))
    assert torch.equal(normed_alone[0], normed_alone[1])
    torch.testing.assert_close(summed_alone, (torch.ones_like(x), torch.ones_like(x)))
    w.requires_grad_(False)
    (ops.rms_norm(x, branch, w, 1e-5, 0.0, True, F32)[0]).sum().backward()
    assert w.grad is None
    torch.testing.assert_close(x.grad, normed_alone[0])


@pytest.mark.parametrize("heads", [(1, 1), (14, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("width", [2, 6, 80, 128])
@pytest.mark.parametrize("kind", [F32, BF16], ids=str)
def test_rotary_embedding(kind, width, heads, device):
    q, k = (random(2, 5, count, width, device=device, dtype=kind, seed=count) for count in heads)
    angles = random(1, 5, width, device=device, seed=4).detach()
    compare(
        lambda q, k: ops.rotary(q.transpose(1, 2), k.transpose(1, 2), angles.cos(), angles.sin(), False, kind),
        lambda q, k: apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), angles.double().cos(), angles.double().sin()),
        [q, k],
        2 * MOST[kind],
    )


def test_rotary_embedding_of_rows_at_other_places_and_in_another_type(device):
    q, k = (random(3, count, 4, 8, device=device) for count in (2, 1))
    cos, sin = (random(3, 4, 8, device=device, seed=seed).detach() for seed in (5, 6))
    turned = ops.rotary(q, k, cos, sin, False, BF16)
    expected = [one.to(BF16) for one in apply_rotary_pos_emb(q, k, cos, sin)]
    for own, other in zip(turned, expected, strict=True):
        torch.testing.assert_close(own, other)
    assert torch.autograd.grad(turned[0].float().sum(), (q, k), allow_unused=True)[0].dtype == F32


@pytest.mark.parametrize("shape", [(1,), (1023,), (1025,), (3, 7, 11)], ids=str)
@pytest.mark.parametrize("kind", [F32, BF16, F16], ids=str)
def test_swiglu(kind, shape, device):
    leaves = [random(*shape, device=device, dtype=kind, seed=seed).detach().mul(4).requires_grad_() for seed in (0, 1)]
    compare(ops.swiglu, lambda gate, up: F.silu(gate) * up, leaves, MOST[kind])


def of_tokens(z, targets, head):
    scale, softcap, temperature = head
    z = z * scale
    every = ((z if softcap is None else torch.tanh(z / softcap) * softcap) / temperature).log_softmax(-1)
    return every.gather(1, targets), -(every.exp() * every).sum(-1)


@pytest.mark.parametrize("head", [(1.0, None, 1.0), (1.0, None, 0.7), (0.5, 20.0, 1.3)], ids=str)
@pytest.mark.parametrize("vocabulary", [1, 2, 1000, 4096, 9001])
@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("entropy", [True, False])
def test_log_probabilities(entropy, columns, vocabulary, head, device):
    z = random(5, vocabulary, device=device).detach().mul(5)
    targets = torch.randint(vocabulary, (5, columns), generator=torch.Generator().manual_seed(1)).to(device)
    pulls = random(5, columns, device=device, seed=2).detach(), random(5, device=device, seed=3).detach()
    wide = z.double().requires_grad_()
    expected = of_tokens(wide, targets, head)
    loss = (expected[0] * pulls[0]).sum() + ((expected[1] * pulls[1]).sum() if entropy else 0)
    gradient, expected = torch.autograd.grad(loss, wide)[0], [one.detach() for one in expected]
    logprobs, entropies, lses = ops.token_logprobs(z, targets, *head, entropy)
    ops.token_logprobs_backward(z, targets, lses, entropies, pulls[0], pulls[1] if entropy else None, *head)
    scale = 1e-5 * float(pulls[0].norm())  # of a vocabulary of one, everything is 0
    for own, other in ((logprobs, expected[0]), (z, gradient), *([(entropies, expected[1])] if entropy else [])):
        assert float((own.double() - other).norm()) <= 1e-5 * float(other.norm()) + scale


def test_log_probabilities_of_sure_and_of_impossible_tokens(device):
    """A small entropy keeps its digits beside large logits; tokens with logits of minus infinity count nothing; NaN stays NaN."""
    z = random(3, 5000, device=device).detach()
    z[:, 7] += 16
    z[1, 4100:] = -torch.inf
    targets = torch.full((3, 1), 7, device=device)
    expected = of_tokens(z.double().nan_to_num(neginf=-1e30), targets, (1.0, None, 1.0))
    logprobs, entropies, _ = ops.token_logprobs(z, targets, 1.0, None, 1.0, True)
    torch.testing.assert_close(logprobs.double(), expected[0], rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(entropies.double(), expected[1], rtol=1e-3, atol=1e-7)
    z[2, 4500] = torch.nan
    logprobs, entropies, _ = ops.token_logprobs(z, targets, 1.0, None, 1.0, True)
    assert [*logprobs.isnan().flatten().tolist(), *entropies.isnan().tolist()] == [False, False, True] * 2


def of_rows(module, model, shared, device):
    """Values and gradients of all weights."""
    inputs, places = model_inputs([[1, 2, 3], [1, 2, 3]], [[4, 5, 6], [7]], shared=shared, device=device)
    hidden = module.base_model(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)[places]
    model.zero_grad()
    (hidden.float() * torch.arange(hidden.numel(), device=device).view_as(hidden).sin()).sum().backward()
    return {"values": hidden.detach(), **{name: one.grad for name, one in model.base_model.named_parameters()}}


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Olmo2"])
@pytest.mark.parametrize("shared", [False, True])
def test_values_and_gradients_of_a_twin_are_the_models(shared, family, build, kernels, use):
    model = build(family)
    own, twins = (of_rows(module, model, shared, use.device) for module in (model, kernels.twin(model, use)))
    for name, one in own.items():
        assert (twins[name] - one).norm() <= 1e-5 * max(float(one.norm()), 1e-3), name


def test_every_kernel_compiles_for_gpus_that_are_not_here():
    """With the arguments of its launches, for Ampere, Hopper and Blackwell: the interpreter accepts more than the compiler."""
    around = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, Path(__file__).with_name("compiled.py"), "80", "90", "100"]
    done = subprocess.run(program, capture_output=True, text=True, env=around, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    names = ["_norm", "_norm_backward", "_rotary", "_swiglu", "_swiglu_backward", "_logprobs", "_logprobs_backward"]
    assert done.stdout.split() == names
