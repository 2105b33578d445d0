"""Blocks in two functions: the numbers and gradients of the model's own blocks, and those left alone that are something else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlhf_host.models import blocks, products
from rlhf_host.models.blocks import AttentionHalf, MlpHalf, fuse_blocks
from rlhf_host.models.forward import Route, forward, set_route
from rlhf_host.models.layouts import shared_layout
from rlhf_host.models.products import has_onednn, pack, packed_product, product
from rlhf_host.models.row_attention import make_blocks

SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "attn_implementation": "sdpa", "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
    "scalar": lambda: LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1)),
}
PROMPTS, LENGTHS, GROUPS = [3, 5, 1], [4, 0, 6, 1, 6, 2], [0, 0, 1, 1, 2, 2]


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[kind]()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(0.3 * torch.randn_like(weight))
    return model.float()


def plain(model: nn.Module) -> nn.Module:
    """A copy that goes its own way."""
    other = copy.deepcopy(model)
    other.blocks_stay = True  # type: ignore[assignment]
    return other


@pytest.fixture(autouse=True)
def _marked_models_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    fuse = blocks.fuse_blocks
    monkeypatch.setattr(
        "rlhf_host.models.forward.fuse_blocks", lambda model: None if hasattr(model, "blocks_stay") else fuse(model)
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each half was computed this way."""
    counts = {"AttentionHalf": 0, "MlpHalf": 0}
    for half in (AttentionHalf, MlpHalf):
        apply = half.apply

        def counted(*args: Any, name: str = half.__name__, apply: Any = apply) -> Any:
            counts[name] += 1
            return apply(*args)

        monkeypatch.setattr(half, "apply", counted)
    return counts


def run(model: nn.Module, shared: str = "on", **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """What a pass gives, and the gradients of a sum of it."""
    prompt_ids = [[(7 * group + place) % 40 for place in range(PROMPTS[group])] for group in GROUPS]
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(40, (len(LENGTHS), 6), generator=generator)
    mask = torch.arange(6) < torch.tensor(LENGTHS)[:, None]
    wanted = frozenset({"values", "scores"}) if hasattr(model, "score") else frozenset({"logprobs"})
    out = forward(model, prompt_ids, ids, mask, torch.tensor(GROUPS), shared_prefix=shared, outputs=wanted, **options)
    found = out.values if out.logprobs is None else out.logprobs
    assert found is not None
    model.zero_grad(set_to_none=True)
    if found.requires_grad:
        (found * torch.randn(found.shape, generator=generator)).sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return found.detach(), gradients


def assert_alike(ours: tuple[Tensor, dict[str, Tensor]], theirs: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        assert (ours[1][name] - gradient).norm() <= 2e-5 * gradient.norm() + 1e-7, name


@pytest.mark.parametrize("by_onednn", [True, False])
@pytest.mark.parametrize("shared", ["on", "off"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_pass_and_its_gradients_are_the_models_own(kind, shared, by_onednn, calls, monkeypatch):
    if by_onednn and not has_onednn():
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(products, "SMALLEST", 0 if by_onednn else 1 << 60)
    model = made(kind)
    expected = run(plain(model), shared)
    assert calls == {"AttentionHalf": 0, "MlpHalf": 0}
    run(model, shared)  # tries it
    calls.update(AttentionHalf=0, MlpHalf=0)
    assert_alike(run(model, shared), expected)
    assert calls == {"AttentionHalf": 2 if shared == "on" and kind != "qwen3" else 0, "MlpHalf": 2}


def test_a_pass_without_gradients_is_the_same_to_the_last_bit():
    model = made("llama")
    with_gradients, _ = run(model)
    with torch.no_grad():
        assert torch.equal(run(model)[0], with_gradients)
    with torch.inference_mode():
        assert torch.equal(run(model)[0], with_gradients)


def test_gradients_are_those_of_finite_differences():
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    torch.manual_seed(0)
    mlp = (random(5, 6), random(6), random(8, 6), random(8, 6), random(6, 8))
    assert torch.autograd.gradcheck(lambda *inputs: MlpHalf.apply(*inputs, 1e-3), mlp)

    layout = shared_layout([[1, 1], [1, 1], [1]], torch.ones(4, dtype=torch.int64), [1, 2, 1], [0, 0, 1])
    assert layout.rows is not None
    tokens = layout.input_ids.shape[1]
    places = make_blocks([2, 1], [1, 2, 1], [0, 0, 1], 2, torch.float64)
    turns = torch.polar(torch.ones(tokens, 1, 2, dtype=torch.float64), torch.rand(tokens, 1, 2, dtype=torch.float64))
    weights = (random(6), random(16, 6), random(8, 6), random(8, 6), random(6, 16))
    biases = (random(16), random(8), random(8))

    def attention(x: Tensor, *given: Tensor) -> Tensor:
        return AttentionHalf.apply(x, *given[:5], turns, places, 0.5, 1e-3, *given[5:])

    assert torch.autograd.gradcheck(attention, (random(tokens, 6), *weights))
    assert torch.autograd.gradcheck(attention, (random(tokens, 6), *weights, *biases))


def test_a_copy_of_a_model_uses_its_own_weights(calls):
    first = made("llama")
    expected = run(first)
    second = copy.deepcopy(first)
    with torch.no_grad():
        for name, weight in first.named_parameters():
            if "mlp" in name or "attn" in name:
                weight.zero_()
    run(second)
    calls.update(AttentionHalf=0, MlpHalf=0)
    assert_alike(run(second), expected)
    assert calls == {"AttentionHalf": 2, "MlpHalf": 2}
    assert not torch.allclose(run(first)[0], expected[0])


def test_recomputed_layers_have_the_same_gradients(calls):
    model = made("llama")
    expected = run(plain(model))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    run(model)
    calls.update(AttentionHalf=0, MlpHalf=0)
    assert_alike(run(model), expected)
    assert calls == {"AttentionHalf": 4, "MlpHalf": 4}


def test_a_frozen_model_is_computed_this_way_too(calls):
    model = made("llama").requires_grad_(False)
    expected = run(plain(model))
    run(model)
    calls.update(AttentionHalf=0, MlpHalf=0)
    assert_alike(run(model), expected)
    assert calls == {"AttentionHalf": 2, "MlpHalf": 2}


class Doubled(nn.SiLU):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def with_lora(model: nn.Module) -> nn.Module:
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))  # type: ignore[arg-type]
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)
    return adapted


def with_a_hook(model: Any) -> nn.Module:
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda _module, _inputs, out: 2 * out)
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda _module, _inputs, out: 2 * out)
    return model


def partly_frozen(model: Any) -> nn.Module:
    for layer in model.model.layers:
        layer.self_attn.q_proj.requires_grad_(False)
    return model


def with_frozen_blocks(model: Any) -> nn.Module:
    model.model.layers.requires_grad_(False)
    return model


def with_another_product(model: Any) -> nn.Module:
    for layer in model.model.layers:
        module = layer.mlp.gate_proj
        module.forward = lambda x, module=module: 3 * F.linear(x, module.weight)
    return model


OTHERS = [with_lora, with_a_hook, partly_frozen, with_frozen_blocks, with_another_product]


@pytest.mark.parametrize("late", [False, True], ids=["from the start", "later"])
@pytest.mark.parametrize("change", OTHERS, ids=[change.__name__ for change in OTHERS])
def test_blocks_that_are_something_else_go_their_own_way(change, late, calls):
    torch.manual_seed(0)
    reference, model = plain(made("llama")), made("llama")
    if late:
        run(model)
    torch.manual_seed(1)
    expected = run(change(reference))
    torch.manual_seed(1)
    changed = change(model)
    run(changed)  # tries what the model can do
    calls.update(AttentionHalf=0, MlpHalf=0)
    assert_alike(run(changed), expected)
    assert calls == {"AttentionHalf": 0, "MlpHalf": 0}


def test_another_activation_is_found_by_trying(calls):
    model: Any = made("llama")
    for layer in model.model.layers:
        layer.mlp.act_fn = Doubled()
    expected = run(plain(model))
    run(model)
    calls.update(AttentionHalf=0, MlpHalf=0)
    assert_alike(run(model), expected)
    assert calls == {"AttentionHalf": 0, "MlpHalf": 0}


def test_wide_models_other_activations_and_other_kinds_are_left_alone(monkeypatch):
    def fused(model: Any) -> bool:
        fuse_blocks(model.eval())
        return any("forward" in vars(layer) for layer in model.model.layers)

    assert fused(made("llama"))
    assert not fused(LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act="gelu")))
    other = made("llama")
    other.config.model_type = "another"
    assert not fused(other)
    assert not fused(made("llama").bfloat16())
    monkeypatch.setattr(blocks, "WIDEST", 16)
    assert not fused(made("llama"))


def test_autocast_and_generation_go_the_models_own_way(calls):
    model: Any = made("llama")
    run(model)
    calls.update(AttentionHalf=0, MlpHalf=0)
    run(model, autocast_dtype=torch.bfloat16)
    model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)
    assert calls == {"AttentionHalf": 0, "MlpHalf": 0}


def test_long_rows_share_only_the_mlp(calls, monkeypatch):
    monkeypatch.setattr(blocks, "LONGEST", 1)
    monkeypatch.setattr("rlhf_host.models.row_attention.LONGEST", 1)
    model = made("llama")
    expected = run(plain(model))
    run(model)
    calls.update(AttentionHalf=0, MlpHalf=0)
    assert_alike(run(model), expected)
    assert calls == {"AttentionHalf": 0, "MlpHalf": 2}


@pytest.mark.parametrize("smallest", [0, 1 << 60])
def test_products(smallest, monkeypatch):
    monkeypatch.setattr(products, "SMALLEST", smallest)
    x, weight, bias = torch.randn(7, 5), torch.randn(3, 5), torch.randn(3)
    torch.testing.assert_close(product(x, weight), x @ weight.t())
    torch.testing.assert_close(product(x, weight, bias), x @ weight.t() + bias)
    torch.testing.assert_close(product(x @ weight.t(), weight.t()), x @ weight.t() @ weight)
    if has_onednn():
        torch.testing.assert_close(packed_product(x, pack(weight), bias), x @ weight.t() + bias)


def test_behind_a_route_gradients_come_in_one_order_whatever_the_layout(calls):
    def order(model: nn.Module, shared: str) -> list[str]:
        seen: list[str] = []
        hooks = [
            weight.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
            for name, weight in model.named_parameters()
        ]
        run(model, shared)
        for hook in hooks:
            hook.remove()
        return seen

    model = made("llama")
    run(model)
    assert order(model, "on") != order(model, "off"), "or else there is no need for this"
    set_route(model, Route())
    calls.update(AttentionHalf=0, MlpHalf=0)
    assert order(model, "on") == order(model, "off")
    assert calls == {"AttentionHalf": 0, "MlpHalf": 0}
