"""``token_logprobs`` is log-softmax and gather, without the logits in memory."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from rlhf_host.models import logprobs as logprobs_module
from rlhf_host.models.logprobs import logprobs_of_logits, token_logprobs, top_logprobs
from rlhf_host.records.token_sets import pack_tokens

TOKENS, WIDTH, VOCABULARY = 11, 6, 23


@pytest.fixture
def parts() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, dtype=torch.float64) for shape in ((TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    )
    return hidden, weight, bias, torch.randint(VOCABULARY, (TOKENS,))


def naive(hidden, weight, bias, targets, temperature=1.0, scale=1.0, softcap=None):
    logits = torch.nn.functional.linear(hidden, weight, bias) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    every = torch.log_softmax(logits / temperature, -1)
    return every.gather(-1, targets[:, None]).squeeze(-1), -(every.exp() * every).sum(-1)


def gradients(loss: Tensor, *leaves: Tensor | None) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None]))


@pytest.mark.parametrize("chunk_tokens", [1, 4, TOKENS, 100])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    "head", [{}, {"temperature": 0.6}, {"temperature": 1.7, "scale": 0.25}, {"temperature": 0.6, "softcap": 2.0}], ids=str
)
def test_values_and_gradients_are_those_of_the_full_logits(parts, head, with_bias, chunk_tokens):
    hidden, weight, bias, targets = parts
    leaves = [hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_() if with_bias else None]
    expected = naive(*leaves, targets, **head)
    found = token_logprobs(*leaves, targets, chunk_tokens=chunk_tokens, with_entropy=True, entropy_grad=True, **head)
    torch.testing.assert_close(found, expected)
    pull = torch.randn(2, TOKENS, dtype=torch.float64)
    torch.testing.assert_close(
        gradients((pull[0] * found[0] + pull[1] * found[1]).sum(), *leaves),
        gradients((pull[0] * expected[0] + pull[1] * expected[1]).sum(), *leaves),
    )


def sets_of(targets: Tensor, vocabulary: int = VOCABULARY, seed: int = 0) -> tuple[list[bytes], Tensor]:
    """Sets with each target in it, of one token, some, all or no limit; and where they allow a token, ``[N, V]``."""
    draw, sets, allowed = np.random.default_rng(seed), [], torch.zeros(len(targets), vocabulary, dtype=torch.bool)
    for row, token in enumerate(targets.tolist()):
        count = (0, 1, 2, vocabulary // 2, vocabulary)[row % 5]
        ids = np.unique([token, *draw.permutation(vocabulary)[: count - 1]]) if count else np.arange(vocabulary)
        sets.append(pack_tokens(ids) if count else b"")
        allowed[row, ids] = True
    return sets, allowed


def restricted(hidden, weight, bias, targets, allowed, temperature=1.0, scale=1.0, softcap=None):
    """The same as ``naive``, over some tokens: what each is out of is summed one by one."""
    logits = torch.nn.functional.linear(hidden, weight, bias) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits, logprobs, entropies = logits / temperature, [], []
    for row, token, own in zip(logits, targets, allowed, strict=True):
        inside = row[own] - row[own].logsumexp(0)
        logprobs.append(row[token] - row[own].logsumexp(0))
        entropies.append(-(inside.exp() * inside).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("head", [{}, {"temperature": 1.7, "scale": 0.25}, {"temperature": 0.6, "softcap": 2.0}], ids=str)
def test_a_softmax_over_some_tokens_has_the_values_and_gradients_of_these_alone(parts, head, chunk_tokens, keep):
    hidden, weight, bias, targets = parts
    leaves, (sets, allowed) = [part.requires_grad_() for part in (hidden, weight, bias)], sets_of(targets)
    expected = restricted(*leaves, targets, allowed, **head)
    settings = {"chunk_tokens": chunk_tokens, "with_entropy": True, "entropy_grad": True, "keep_logits": keep}
    found = token_logprobs(*leaves, targets, support=sets, **settings, **head)
    torch.testing.assert_close(found, expected)
    assert found[0][1].item() == found[1][1].item() == 0.0, "where one token could be drawn"
    pull = torch.randn(2, TOKENS, dtype=torch.float64)
    loss, wanted = ((pull[0] * one[0] + pull[1] * one[1]).sum() for one in (found, expected))
    torch.testing.assert_close(gradients(loss, *leaves), gradients(wanted, *leaves))
    if not {"scale", "softcap"} & head.keys():
        logits = torch.nn.functional.linear(hidden, weight, bias)
        other = logprobs_of_logits(logits, targets, head.get("temperature", 1.0), True, True, sets)
        torch.testing.assert_close(other, expected, check_dtype=False, atol=1e-5, rtol=1e-5)


def test_products_in_16_bits_are_restricted_too(parts):
    hidden, weight, bias, targets = (part.float() if part.is_floating_point() else part for part in parts)
    sets, allowed = sets_of(targets)
    leaves = [part.requires_grad_() for part in (hidden, weight, bias)]
    runs = []
    for keep in (False, True):
        found, _ = token_logprobs(
            *leaves, targets, support=sets, compute_dtype=torch.bfloat16, chunk_tokens=4, keep_logits=keep
        )
        runs.append([found, *gradients(found.sum(), *leaves)])
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))
    torch.testing.assert_close(runs[0][0], restricted(*leaves, targets, allowed)[0], atol=0.05, rtol=0.05)


@pytest.mark.parametrize("compute", [None, torch.bfloat16], ids=["wide", "narrow"])
@pytest.mark.parametrize("head", [{}, {"temperature": 0.6, "softcap": 2.0}], ids=str)
def test_kept_logits_change_no_bit(parts, head, compute):
    hidden, weight, bias, targets = (part.float() if part.is_floating_point() else part for part in parts)
    leaves = [hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    pull, products = torch.randn(2, TOKENS), []

    def run(keep: bool) -> list[Tensor]:
        options = {"chunk_tokens": 4, "with_entropy": True, "entropy_grad": True, "compute_dtype": compute, **head}
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
            logprobs, entropy = token_logprobs(*leaves, targets, keep_logits=keep, **options)
        products.append(sum(one.nbytes for one in kept if one.shape[-1] == len(weight) and one.dim() == 2))
        values = [logprobs.detach(), entropy.detach()]
        return values + gradients((pull[0] * logprobs + pull[1] * entropy).sum(), *leaves)

    found = [run(False), run(True)]
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    width = (4 if compute is None else 2) * (2 if "softcap" in head and compute is None else 1)
    assert products == [0, width * TOKENS * len(weight)]


def test_logits_of_other_heads_have_the_same_temperature(parts):
    hidden, weight, bias, targets = parts
    logits = torch.nn.functional.linear(hidden, weight, bias)
    found = logprobs_of_logits(logits, targets, 0.6, True, False)
    expected = naive(hidden, weight, bias, targets, temperature=0.6)
    torch.testing.assert_close(found, tuple(each.float() for each in expected))


def test_entropy_carries_a_gradient_only_when_asked(parts):
    hidden, weight, bias, targets = parts
    hidden.requires_grad_()
    assert token_logprobs(hidden, weight, bias, targets)[1] is None
    logprobs, entropy = token_logprobs(hidden, weight, bias, targets, with_entropy=True)
    assert logprobs.requires_grad
    assert not entropy.requires_grad
    torch.testing.assert_close(entropy, naive(hidden, weight, bias, targets)[1].detach())


def test_tied_weights_sum_the_gradients_of_both_uses(parts):
    _, weight, _, targets = parts
    weight.requires_grad_()
    tokens = torch.randint(VOCABULARY, (TOKENS,))
    found = token_logprobs(weight[tokens], weight, None, targets, chunk_tokens=3)[0]
    expected = naive(weight[tokens], weight, None, targets)[0]
    torch.testing.assert_close(gradients(found.sum(), weight), gradients(expected.sum(), weight))


@pytest.mark.parametrize("chunk_tokens", [3, 100])
def test_float32_agrees_with_float64(parts, chunk_tokens):
    hidden, weight, bias, targets = parts
    expected = naive(30 * hidden, weight, bias, targets, 0.5)[0]
    found = token_logprobs(30 * hidden.float(), weight.float(), bias.float(), targets, 0.5, chunk_tokens=chunk_tokens)[0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("chunk_tokens", [3, 100])
def test_bfloat16_products_keep_float32_sums(parts, chunk_tokens):
    hidden, weight, bias, targets = (part.float() if part.is_floating_point() else part for part in parts)
    leaves = [hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    expected = naive(*leaves, targets)[0]
    found = token_logprobs(*leaves, targets, compute_dtype=torch.bfloat16, chunk_tokens=chunk_tokens)[0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.02)
    for ours, theirs in zip(gradients(found.sum(), *leaves), gradients(expected.sum(), *leaves), strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() < 0.02 * theirs.norm()


def test_autocast_around_it_changes_nothing(parts):
    hidden, weight, bias, targets = (part.float() if part.is_floating_point() else part for part in parts)
    hidden.requires_grad_()
    expected = token_logprobs(hidden, weight, bias, targets)[0]
    with torch.autocast("cpu", torch.bfloat16):
        found = token_logprobs(hidden, weight, bias, targets)[0]
        inside = gradients(found.sum(), hidden)
    assert torch.equal(found, expected)
    torch.testing.assert_close(inside, gradients(expected.sum(), hidden), rtol=0, atol=0)


def test_it_can_be_checkpointed(parts):
    hidden, weight, bias, targets = parts
    hidden.requires_grad_()
    found = checkpoint(lambda h: token_logprobs(h, weight, bias, targets, chunk_tokens=4)[0], hidden, use_reentrant=False)
    torch.testing.assert_close(gradients(found.sum(), hidden), gradients(naive(hidden, weight, bias, targets)[0].sum(), hidden))


def test_frozen_weights_get_no_gradient(parts):
    hidden, weight, bias, targets = parts
    token_logprobs(hidden.requires_grad_(), weight, bias, targets)[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
    assert bias.grad is None


class Largest(TorchDispatchMode):
    """The largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else [result]:
            if isinstance(item, Tensor):
                self.elements = max(self.elements, item.numel())
        return result


def test_no_more_logits_than_a_chunk_are_ever_held():
    tokens, vocabulary, chunk = 64, 1000, 4
    hidden, weight = torch.randn(tokens, 2, requires_grad=True), torch.randn(vocabulary, 2, requires_grad=True)
    with Largest() as largest:
        logprobs, entropy = token_logprobs(
            hidden, weight, None, torch.arange(tokens), chunk_tokens=chunk, with_entropy=True, entropy_grad=True
        )
        (logprobs + entropy).sum().backward()
    assert largest.elements == chunk * vocabulary
    with Largest() as largest:
        naive(hidden, weight, None, torch.arange(tokens))[0].sum().backward()
    assert largest.elements == tokens * vocabulary


def head_gradient_in_16_bits(tokens, chunk):
    """The head's gradient of a bfloat16 product, its relative distance to that of float64, and how often all of it was added to."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, 16).bfloat16(), torch.randn(200, 16).bfloat16()
    targets, pull = torch.randint(200, (tokens,)), torch.randn(tokens)
    added = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal added
            result = function(*args, **(kwargs or {}))
            added += "add" in str(function) and result.dtype == torch.float32 and result.shape == weight.shape
            return result

    def gradient_of(dtype, compute, watch):
        leaf = weight.to(dtype).requires_grad_()
        found = token_logprobs(hidden.to(dtype), leaf, None, targets, compute_dtype=compute, chunk_tokens=chunk)[0]
        with watch:
            return gradients((found * pull).sum(), leaf)[0].double()

    found = gradient_of(torch.float32, torch.bfloat16, Watch())
    expected = gradient_of(torch.float64, None, contextlib.nullcontext())
    return float((found - expected).norm() / expected.norm()), added


@pytest.mark.parametrize("tokens", [3, 64, 70])
def test_the_gradient_of_the_head_in_16_bits_is_added_up_in_few_large_parts(tokens, monkeypatch):
    """Each addition in 32 bits reads and writes the whole gradient, which costs more than the product on GPUs."""
    gap, added = head_gradient_in_16_bits(tokens, chunk=4)
    monkeypatch.setattr(logprobs_module, "STACKED", 1)
    before, every_chunk = head_gradient_in_16_bits(tokens, chunk=4)
    assert every_chunk == -(-tokens // 4)
    assert added == -(-tokens // 16)
    assert gap <= 1.1 * before < 0.02


# --- several tokens at each place -------------------------------------------------------------------

HEADS = [{}, {"temperature": 0.6}, {"temperature": 1.7, "scale": 0.25}, {"temperature": 0.6, "softcap": 2.0}]


@pytest.mark.parametrize("chunk_tokens", [1, 4, TOKENS, 100])
@pytest.mark.parametrize("head", HEADS, ids=str)
def test_several_tokens_at_a_place_have_the_values_and_gradients_of_the_full_logits(parts, head, chunk_tokens):
    hidden, weight, bias, targets = parts
    several = torch.randint(VOCABULARY, (TOKENS, 5))
    several[:, 0], several[:, 4] = targets, several[:, 3]  # a token may be there twice
    leaves = [hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    expected = torch.stack([naive(*leaves, several[:, column], **head)[0] for column in range(5)], -1)
    entropy = naive(*leaves, targets, **head)[1]
    found = token_logprobs(*leaves, several, chunk_tokens=chunk_tokens, with_entropy=True, entropy_grad=True, **head)
    torch.testing.assert_close(found, (expected, entropy))
    pull, other = torch.randn(TOKENS, 5, dtype=torch.float64), torch.randn(TOKENS, dtype=torch.float64)
    torch.testing.assert_close(
        gradients((pull * found[0]).sum() + (other * found[1]).sum(), *leaves),
        gradients((pull * expected).sum() + (other * entropy).sum(), *leaves),
    )


@pytest.mark.parametrize("chunk_tokens", [1, 4, TOKENS, 100])
@pytest.mark.parametrize("head", HEADS, ids=str)
def test_the_likeliest_tokens_are_those_of_the_full_logits(parts, head, chunk_tokens):
    hidden, weight, bias, _ = parts
    every = torch.stack(
        [naive(hidden, weight, bias, torch.full((TOKENS,), token), **head)[0] for token in range(VOCABULARY)], -1
    )
    logprobs, ids = top_logprobs(hidden, weight, bias, 7, chunk_tokens=chunk_tokens, **head)
    expected = every.topk(7)
    torch.testing.assert_close(logprobs, expected.values)
    assert ids.equal(expected.indices)
    assert not logprobs.requires_grad


def test_of_the_likeliest_tokens_never_are_all_logits_in_memory():
    hidden, weight = torch.randn(64, WIDTH), torch.randn(1000, WIDTH)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            found = function(*args, **(kwargs or {}))
            for part in found if isinstance(found, tuple | list) else (found,):
                largest = max(largest, part.numel() if isinstance(part, Tensor) else 0)
            return found

    with Watch():
        _, ids = top_logprobs(hidden, weight, None, 8, chunk_tokens=4)
        leaf = hidden.clone().requires_grad_()
        token_logprobs(leaf, weight, None, ids, chunk_tokens=4)[0].sum().backward()
    assert largest <= max(4 * 1000, weight.numel())
