"""Blocks in two functions: the numbers and gradients of the model's own blocks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from rlhf_authoring import model_inputs
from rlhf_kernels_cpu import blocks, products
from rlhf_kernels_cpu.blocks import AttentionHalf, MlpHalf
from rlhf_kernels_cpu.products import has_onednn, pack, packed_product, product
from rlhf_kernels_cpu.rows import RowAttention, make_blocks
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

PROMPTS, LENGTHS = [[1, 2, 3], [7, 8, 9, 10, 11], [14]], [4, 0, 6, 1, 6, 2]
ROWS = (
    [PROMPTS[row // 2] for row in range(6)],
    [[(7 * row + 3 * place) % 40 for place in range(n)] for row, n in enumerate(LENGTHS)],
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts how often each half was computed this way."""
    counts: dict[str, int] = {}
    for half in (AttentionHalf, MlpHalf, RowAttention):
        counts[half.__name__] = 0

        def counted(*args: Any, name: str = half.__name__, apply: Any = half.apply) -> Any:
            counts[name] += 1
            return apply(*args)

        monkeypatch.setattr(half, "apply", counted)
    return counts


@pytest.fixture
def twin_of(kernels, use):
    def make(model: nn.Module) -> Any:
        assert kernels.unsuited(model, use("train")) is None
        return kernels.twin(model, use("train"))

    return make


def run(module: Any, model: nn.Module | None = None, shared: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    """The hidden states of a pass over ``module``, and the gradients of a sum of them on the parameters of ``model``."""
    model = module if model is None else model
    inputs, places = model_inputs(*ROWS, shared=shared)
    hidden = module.base_model(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)[places]
    model.zero_grad(set_to_none=True)
    if hidden.requires_grad:
        (hidden * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    return hidden.detach(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def assert_alike(ours: tuple[Tensor, dict[str, Tensor]], theirs: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        assert (ours[1][name] - gradient).norm() <= 2e-5 * gradient.norm() + 1e-7, name


@pytest.mark.parametrize("by_onednn", [True, False])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "padded"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "scalar"])
def test_a_pass_and_its_gradients_are_the_models_own(kind, shared, by_onednn, calls, monkeypatch, build, twin_of):
    if by_onednn and not has_onednn():
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(products, "SMALLEST", 0 if by_onednn else 1 << 60)
    model = build(kind, **{"sliding_window": 64} if kind == "mistral" else {})
    expected = run(model, shared=shared)
    twin = twin_of(model)
    assert set(calls.values()) == {0}
    assert_alike(run(twin, model, shared), expected)
    normed, rows = kind == "qwen3", 2 if shared else 0
    assert calls == {"AttentionHalf": 0 if normed else rows, "MlpHalf": 2, "RowAttention": rows if normed else 0}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_pass_without_gradients_is_the_same_to_the_last_bit(kind, build, twin_of):
    twin = twin_of(build(kind))
    with_gradients, _ = run(twin)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(run(twin)[0], with_gradients)


def test_gradients_are_those_of_finite_differences():
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    torch.manual_seed(0)
    mlp = (random(5, 6), random(6), random(8, 6), random(8, 6), random(6, 8))
    assert torch.autograd.gradcheck(lambda *inputs: MlpHalf.apply(*inputs, 1e-3), mlp)

    prompts, lengths, owners = [2, 1], [1, 2, 1], [0, 0, 1]
    tokens = sum(prompts) + sum(lengths)
    places = make_blocks(prompts, lengths, owners, 2, torch.float64)
    turns = torch.polar(torch.ones(tokens, 1, 2, dtype=torch.float64), torch.rand(tokens, 1, 2, dtype=torch.float64))
    weights = (random(6), random(16, 6), random(8, 6), random(8, 6), random(6, 16))
    biases = (random(16), random(8), random(8))

    def attention(x: Tensor, *weights: Tensor) -> Tensor:
        return AttentionHalf.apply(x, *weights[:5], turns, places, 0.5, 1e-3, *weights[5:])

    assert torch.autograd.gradcheck(attention, (random(tokens, 6), *weights))
    assert torch.autograd.gradcheck(attention, (random(tokens, 6), *weights, *biases))


def test_a_copy_of_a_twin_uses_its_own_weights(calls, build, twin_of):
    model = build("llama")
    expected = run(model)
    twin = twin_of(model)
    other = copy.deepcopy(twin)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "mlp" in name or "attn" in name:
                weight.zero_()
    assert_alike(run(other), expected)
    assert calls == {"AttentionHalf": 2, "MlpHalf": 2, "RowAttention": 0}
    assert not torch.allclose(run(twin, model)[0], expected[0])


@pytest.mark.parametrize("enabled", ["before the twin", "on the twin"])
def test_recomputed_layers_have_the_same_gradients(enabled, calls, build, twin_of):
    model = build("llama")
    expected = run(model)
    if enabled == "before the twin":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    twin = twin_of(model)
    if enabled == "on the twin":
        twin.gradient_checkpointing_enable({"use_reentrant": False})
    plain = run(twin_of(build("llama")))
    calls.update(AttentionHalf=0, MlpHalf=0)
    for layer in twin.modules():
        layer.training = isinstance(layer, GradientCheckpointingLayer)
    found = run(twin, model)
    assert_alike(found, expected)
    assert torch.equal(found[0], plain[0])
    assert calls == {"AttentionHalf": 4, "MlpHalf": 4, "RowAttention": 0}


def test_a_frozen_model_is_computed_this_way_too(calls, build, twin_of):
    model = build("llama").requires_grad_(False)
    assert_alike(run(twin_of(model)), run(model))
    assert calls == {"AttentionHalf": 2, "MlpHalf": 2, "RowAttention": 0}


def freeze_queries(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj.requires_grad_(False)


def freeze_blocks(model: Any) -> None:
    model.model.layers.requires_grad_(False)


def freeze_the_first(model: Any) -> None:
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)


@pytest.mark.parametrize("freeze", [freeze_queries, freeze_blocks, freeze_the_first])
def test_what_is_frozen_gets_no_gradient(freeze, calls, build, twin_of):
    model = build("llama")
    freeze(model)
    expected, twin = run(model), twin_of(model)
    found = run(twin, model)
    assert_alike(found, expected)
    assert calls == {"AttentionHalf": 2, "MlpHalf": 2, "RowAttention": 0}
    with torch.no_grad():
        assert torch.equal(run(twin, model)[0], found[0])


def test_a_twin_may_be_made_in_inference_mode(calls, build, twin_of):
    model = build("llama")
    expected = run(model)
    with torch.inference_mode():
        twin = twin_of(model)
        first, _ = run(twin, model)
    found = run(twin, model)
    assert torch.equal(found[0], first)
    assert_alike(found, expected)
    assert calls == {"AttentionHalf": 4, "MlpHalf": 4, "RowAttention": 0}


def test_dropout_in_attention_is_the_models_own(calls, build, twin_of):
    twin = twin_of(build("llama", attention_dropout=0.5))
    run(twin)
    assert calls == {"AttentionHalf": 2, "MlpHalf": 2, "RowAttention": 0}
    twin.train()
    twin(torch.tensor([[1, 2, 3]]))
    assert calls == {"AttentionHalf": 2, "MlpHalf": 2, "RowAttention": 0}


def test_autocast_caches_and_arguments_of_tomorrow_go_the_models_own_way(calls, build, twin_of):
    model = build("llama")
    twin, ids = twin_of(model), torch.tensor([[1, 2, 3]])
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(run(twin, model)[0], run(model)[0])
    assert torch.equal(*(one.generate(ids, max_new_tokens=4, do_sample=False) for one in (twin, model)))
    assert torch.equal(*(one(ids, use_cache=False, an_option_of_tomorrow=1).logits for one in (twin, model)))
    assert set(calls.values()) == {0}


def test_hidden_states_of_every_layer_are_given(build, twin_of):
    model = build("llama")
    own, ours = (one(torch.tensor([[1, 2, 3]]), output_hidden_states=True).hidden_states for one in (model, twin_of(model)))
    assert len(ours) == len(own) == 3
    for one, other in zip(ours, own, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_long_rows_share_only_the_mlp(kind, calls, monkeypatch, build, twin_of):
    monkeypatch.setattr(blocks, "LONGEST", 0)
    model = build(kind)
    assert_alike(run(twin_of(model), model), run(model))
    assert calls == {"AttentionHalf": 0, "MlpHalf": 2, "RowAttention": 0}


@pytest.mark.parametrize("smallest", [0, 1 << 60])
def test_products(smallest, monkeypatch):
    monkeypatch.setattr(products, "SMALLEST", smallest)
    x, weight, bias = torch.randn(7, 5), torch.randn(3, 5), torch.randn(3)
    torch.testing.assert_close(product(x, weight), x @ weight.t())
    torch.testing.assert_close(product(x, weight, bias), x @ weight.t() + bias)
    torch.testing.assert_close(product(x @ weight.t(), weight.t()), x @ weight.t() @ weight)
    if has_onednn():
        torch.testing.assert_close(packed_product(x, pack(weight), bias), x @ weight.t() + bias)
