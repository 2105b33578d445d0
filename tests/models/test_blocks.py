"""Blocks in two functions: the numbers and gradients of the model's own blocks, and those left alone that are something else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LNTuningConfig, LoraConfig, get_peft_model
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
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

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


def freeze_queries(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj.requires_grad_(False)


def freeze_blocks(model: Any) -> None:
    model.model.layers.requires_grad_(False)


def freeze_the_first(model: Any) -> None:
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)


@pytest.mark.parametrize("freeze", [freeze_queries, freeze_blocks, freeze_the_first])
def test_what_is_frozen_gets_no_gradient(freeze, calls):
    model = made("llama")
    freeze(model)
    expected = run(plain(model))
    run(model)
    calls.update(AttentionHalf=0, MlpHalf=0)
    found = run(model)
    assert_alike(found, expected)
    assert calls == {"AttentionHalf": 2, "MlpHalf": 2}
    with torch.no_grad():
        assert torch.equal(run(model)[0], found[0])


class Doubled(nn.SiLU):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OtherMlp(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OtherLayer(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        return hidden_states + super().forward(hidden_states, **options)


class StrictLayer(LlamaDecoderLayer):
    """Takes no more arguments than transformers hands to it."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Any, position_ids: Any, past_key_values: Any, use_cache: Any,
        position_embeddings: Any,
    ) -> Tensor:  # fmt: skip
        return super().forward(hidden_states, attention_mask, position_ids, position_embeddings=position_embeddings)


def twice(_module: nn.Module, _inputs: Any, out: Tensor) -> Tensor:
    return 2 * out


def lora(model: Any) -> None:
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)


def hook(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.register_forward_hook(twice)


def hook_of_the_mlp(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(twice)


def hook_of_the_activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn.register_forward_hook(twice)


def hook_before_the_norm(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm.register_forward_pre_hook(lambda _, inputs: (inputs[0] + 1,))


def hook_of_the_gradient(model: Any) -> None:
    model.model.layers[1].self_attn.o_proj.register_full_backward_hook(lambda _, of_inputs, __: (2 * of_inputs[0],))


def hook_before_the_gradient(model: Any) -> None:
    model.model.layers[1].mlp.register_full_backward_pre_hook(lambda _, of_outputs: (2 * of_outputs[0],))


def other_product(model: Any) -> None:
    module = model.model.layers[1].mlp.gate_proj
    module.forward = lambda x: 3 * F.linear(x, module.weight)


def other_mlp_forward(model: Any) -> None:
    module = model.model.layers[1].mlp
    module.forward = lambda x: 2 * type(module).forward(module, x)


def other_norm_forward(model: Any) -> None:
    module = model.model.layers[1].input_layernorm
    module.forward = lambda x: 2 * type(module).forward(module, x)


def other_activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = Doubled()


def other_mlp(model: Any) -> None:
    model.model.layers[1].mlp.__class__ = OtherMlp


def other_layer(model: Any) -> None:
    model.model.layers[1].__class__ = OtherLayer


def bias_below(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.bias = nn.Parameter(torch.ones(32))


def bias_of_keys(model: Any) -> None:
    model.model.layers[1].self_attn.k_proj.bias = nn.Parameter(torch.ones(16))


def tuned_norms(model: Any) -> None:
    get_peft_model(model, LNTuningConfig(target_modules=["input_layernorm"]))


CHANGES: dict[Any, int] = {
    lora: 2, hook: 1, hook_of_the_mlp: 1, hook_of_the_activation: 1, hook_before_the_norm: 1, hook_of_the_gradient: 1,
    hook_before_the_gradient: 1, other_product: 1, other_mlp_forward: 1, other_norm_forward: 1, other_activation: 1,
    other_mlp: 1, other_layer: 1, bias_below: 1, bias_of_keys: 1, tuned_norms: 2,
}  # fmt: skip
"""What changes → in how many of the two blocks."""


@pytest.mark.parametrize("late", [False, True], ids=["from the start", "later"])
@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_blocks_that_are_something_else_go_their_own_way(change, late, calls):
    reference, model = plain(made("llama")), made("llama")
    if late:
        run(model)
    for one in (reference, model):
        torch.manual_seed(1)
        change(one)
    expected = run(reference, "off")
    run(model, "off")  # tries what the model can do
    calls.update(AttentionHalf=0, MlpHalf=0)
    assert_alike(run(model, "off"), expected)
    assert calls == {"AttentionHalf": 0, "MlpHalf": 2 - CHANGES[change]}
    if change not in (other_layer, other_norm_forward):
        assert_alike(run(model, "auto"), run(reference, "auto"))


@pytest.mark.parametrize("kind", [StrictLayer, OtherLayer])
def test_blocks_whose_trial_fails_are_left_alone(kind):
    model: Any = made("llama")
    for layer in model.model.layers:
        layer.__class__ = kind
    assert_alike(run(model, "off"), run(plain(model), "off"))
    assert all("forward" not in vars(layer) for layer in model.model.layers)


def test_the_first_pass_may_be_in_inference_mode(calls):
    model = made("llama")
    with torch.inference_mode():
        first, _ = run(model)
    calls.update(AttentionHalf=0, MlpHalf=0)
    found = run(model)
    assert torch.equal(found[0], first)
    assert calls == {"AttentionHalf": 2, "MlpHalf": 2}
    assert_alike(found, run(plain(model)))


def test_the_trial_depends_on_no_weight_and_gives_no_hook_a_gradient():
    model: Any = made("llama")
    seen = []
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1000)
    for weight in model.parameters():
        weight.register_hook(seen.append)
    fuse_blocks(model.eval())
    assert all("forward" in vars(layer) for layer in model.model.layers)
    assert not seen


def test_a_pickled_model_comes_back_whole(tmp_path):
    model = made("llama")
    expected = run(model)
    torch.save(model, tmp_path / "model.pt")
    assert_alike(run(torch.load(tmp_path / "model.pt", weights_only=False)), expected)


def test_dropout_in_attention_is_the_models_own(calls):
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES, attention_dropout=0.5)).float()
    run(model)
    calls.update(AttentionHalf=0, MlpHalf=0)
    run(model)
    assert calls == {"AttentionHalf": 2, "MlpHalf": 2}
    model.train()
    model(torch.tensor([[1, 2, 3]]))
    assert calls == {"AttentionHalf": 2, "MlpHalf": 2}


def test_attention_that_is_asked_for_its_weights_gives_them():
    model: Any = made("llama")
    run(model)
    model.set_attn_implementation("eager")
    out = model(torch.tensor([[1, 2, 3]]), output_attentions=True, output_hidden_states=True)
    assert len(out.attentions) == 2
    assert len(out.hidden_states) == 3


def test_models_with_biases_elsewhere_and_other_attention_are_left_alone():
    for settings in ({"attention_bias": True}, {"mlp_bias": True}, {"attn_implementation": "eager"}):
        model: Any = LlamaForCausalLM(LlamaConfig(**{**SIZES, **settings}))
        fuse_blocks(model.eval())
        assert all("forward" not in vars(layer) for layer in model.model.layers), settings


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
