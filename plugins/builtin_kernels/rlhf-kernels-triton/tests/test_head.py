"""The head's log-probabilities, entropy and gradients are the host's own. Where Triton cannot run, its formulas stand in for it."""

from __future__ import annotations

import pytest
import torch
from rlhf_kernels_triton.head import token_logprobs

from rlhf_host.comparison import token_logprobs as plain

pytestmark = pytest.mark.usefixtures("computing")

VOCABULARY, WIDTH = 1003, 24
HEADS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "scale and softcap": {"scale": 0.5, "softcap": 20.0, "temperature": 1.3},
}


def results(function, device, *, tokens=13, columns=None, bias=True, dtype=torch.float32, twice=False, **settings):
    generator = torch.Generator().manual_seed(0)
    shape = (tokens,) if columns is None else (tokens, columns)
    values = [
        torch.randn(size, generator=generator)
        for size in ((tokens, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,), shape, (tokens,))
    ]
    targets = torch.randint(VOCABULARY, shape, generator=generator).to(device)
    hidden, weight, shift, pull, of_entropy = (value.to(device) for value in values)
    leaves = [hidden.to(dtype).requires_grad_(), weight.mul(0.4).requires_grad_(), shift.requires_grad_()]
    logprobs, entropy = function(*leaves[:2], leaves[2] if bias else None, targets, compute_dtype=dtype, **settings)
    loss = (logprobs * pull).sum()
    if entropy is not None and entropy.requires_grad:
        loss = loss + (entropy * of_entropy).sum()
    gradients = torch.autograd.grad(loss, leaves[: 2 + bias], retain_graph=True)
    if twice:
        gradients = torch.autograd.grad(loss, leaves[: 2 + bias])
    return [logprobs.detach(), *([] if entropy is None else [entropy.detach()]), *gradients]


def expect_close(own, expected, most):
    assert len(own) == len(expected)
    for one, other in zip(own, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert float((one.double() - other.double()).norm()) <= most * float(other.double().norm())


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("chunk", "keep"), [(None, False), (5, False), (5, True)])
@pytest.mark.parametrize("entropy", ["none", "measured", "trained"])
def test_it_computes_what_the_hosts_own_does(head, chunk, keep, entropy, device):
    settings = HEADS[head] | {"chunk_tokens": chunk, "keep_logits": keep}
    settings |= {"with_entropy": entropy != "none", "entropy_grad": entropy == "trained"}
    expect_close(*(results(one, device, **settings) for one in (token_logprobs, plain)), 1e-5)


def test_several_tokens_at_a_place(device):
    settings = {"columns": 3, "chunk_tokens": 4, "with_entropy": True, "entropy_grad": True, "bias": False}
    expect_close(*(results(one, device, **settings) for one in (token_logprobs, plain)), 1e-5)


def test_products_in_16_bits_are_added_in_32(device):
    settings = {"dtype": torch.bfloat16, "chunk_tokens": 4, "with_entropy": True, "bias": False}
    expect_close(*(results(one, device, **settings) for one in (token_logprobs, plain)), 1e-2)


@pytest.mark.parametrize("kept", [{}, {"chunk_tokens": 5, "keep_logits": True}], ids=["one chunk", "asked"])
def test_a_second_backward_pass_finds_its_logits(kept, device):
    """The first writes over those that were kept."""
    expect_close(results(token_logprobs, device, twice=True, **kept), results(token_logprobs, device), 1e-6)


def test_no_gradient_is_computed_that_nobody_needs(device):
    hidden, weight = torch.randn(4, WIDTH, device=device, requires_grad=True), torch.randn(VOCABULARY, WIDTH, device=device)
    targets = torch.arange(4, device=device)
    token_logprobs(hidden, weight, None, targets)[0].sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None
    assert token_logprobs(hidden, weight, None, targets)[1] is None
    entropy = token_logprobs(hidden, weight, None, targets, with_entropy=True)[1]
    assert entropy is not None
    assert not entropy.requires_grad


def test_float64_and_no_tokens_are_the_hosts_own(device):
    expect_close(*(results(one, device, dtype=torch.float64, bias=False) for one in (token_logprobs, plain)), 1e-12)
    hidden, weight = torch.randn(0, WIDTH, device=device), torch.randn(VOCABULARY, WIDTH, device=device)
    assert token_logprobs(hidden, weight, None, torch.zeros(0, dtype=torch.int64, device=device))[0].shape == (0,)
