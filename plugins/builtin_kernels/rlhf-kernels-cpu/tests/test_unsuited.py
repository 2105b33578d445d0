"""Models that are something else, however much they look like Llamas, are refused by their parts and their code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from peft import LNTuningConfig, LoraConfig, PromptTuningConfig, get_peft_model
from rlhf_authoring import model_inputs
from rlhf_kernels_cpu import llama
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm

TINY = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class Doubled(nn.SiLU):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OtherMlp(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OtherNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class OtherLayer(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        return hidden_states + super().forward(hidden_states, **options)


def twice(_module: nn.Module, _inputs: Any, out: Tensor) -> Tensor:
    return 2 * out


def lora(model: Any) -> None:
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))


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


def other_mlp(model: Any) -> None:
    model.model.layers[1].mlp.__class__ = OtherMlp


def other_norm(model: Any) -> None:
    model.model.layers[1].input_layernorm.__class__ = OtherNorm


def other_layer(model: Any) -> None:
    model.model.layers[1].__class__ = OtherLayer


def bias_below(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.bias = nn.Parameter(torch.ones(32))


def bias_of_keys(model: Any) -> None:
    model.model.layers[1].self_attn.k_proj.bias = nn.Parameter(torch.ones(16))


def tuned_norms(model: Any) -> None:
    get_peft_model(model, LNTuningConfig(target_modules=["input_layernorm"]))


def half_of_it_in_16_bits(model: Any) -> None:
    model.model.layers[1].bfloat16()


CHANGES: dict[Any, str] = {
    lora: "product of layer 0", hook: "layers.1.mlp.up_proj has hooks", hook_of_the_mlp: "layers.1.mlp has hooks",
    hook_of_the_activation: "act_fn has hooks", hook_before_the_norm: "layernorm has hooks",
    hook_of_the_gradient: "o_proj has hooks", hook_before_the_gradient: "mlp has hooks",
    other_product: "gate_proj has hooks or a forward of its own", other_mlp_forward: "forward of its own",
    other_norm_forward: "forward of its own", other_mlp: "MLP of layer 1", other_norm: "norm of layer 1",
    other_layer: "code of layer 1", bias_below: "bias of layer 1", bias_of_keys: "bias of layer 1",
    tuned_norms: "norm of layer 0", half_of_it_in_16_bits: "float32",
}  # fmt: skip
"""A change → what is said."""


@pytest.mark.parametrize("purpose", ["train", "sample"])
@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_a_changed_part_is_seen(change, purpose, kernels, build, use):
    model = build("llama")
    assert kernels.unsuited(model, use(purpose)) is None
    change(model)
    assert CHANGES[change] in kernels.unsuited(model, use(purpose))


@pytest.mark.parametrize(
    ("purpose", "changes", "reason"),
    [
        ("train", {"device": torch.device("cuda")}, "it is for CPUs"),
        ("train", {"autocast": torch.bfloat16}, "it computes in float32"),
        ("sample", {"autocast": torch.bfloat16}, "it computes in float32"),
        ("train", {"even_passes": True}, "the order of its gradients"),
    ],
)
def test_uses_that_it_is_not_for(purpose, changes, reason, kernels, build, use):
    assert kernels.unsuited(build("llama"), use(purpose, **changes)).startswith(reason)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"attention_bias": True}, "the bias of layer 0"),
        ({"mlp_bias": True}, "the bias of layer 0"),
        ({"attn_implementation": "eager"}, "attention is eager, not sdpa"),
        ({"hidden_act": "gelu"}, "an activation other than silu"),
    ],
)
def test_settings_of_a_model_that_it_is_not_for(settings, reason, kernels, build, use):
    assert reason in kernels.unsuited(build("llama", **settings), use("train"))


def test_another_activation_is_trained_plainly_and_sampled_here(kernels, build, use):
    model: Any = build("llama")
    model.model.layers[1].mlp.act_fn = Doubled()
    assert "an activation other than silu" in kernels.unsuited(model, use("train"))
    assert kernels.unsuited(model, use("sample")) is None


def test_wide_models_are_trained_plainly(kernels, build, use, monkeypatch):
    monkeypatch.setattr(llama, "WIDEST", 16)
    assert kernels.unsuited(build("llama"), use("train")) == "nothing is gained beyond a hidden size of 16"
    assert kernels.unsuited(build("llama"), use("sample")) is None


def test_scalar_heads_and_virtual_prompts_are_not_sampled(kernels, build, use):
    assert kernels.unsuited(build("scalar"), use("sample")) == "the model is not a Llama for causal language modelling"
    prompted = get_peft_model(build("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    for purpose in ("train", "sample"):
        assert kernels.unsuited(prompted, use(purpose)) == "the model is not made as Llama is"
    assert kernels.unsuited(nn.Linear(2, 2), use("train")) == "the model is not made as Llama is"


@pytest.mark.parametrize(
    ("rope", "sampled"),
    [
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, True),
        ({"rope_type": "yarn", "factor": 4.0}, True),
        ({"rope_type": "linear", "factor": 2.0}, True),
        ({"rope_type": "dynamic", "factor": 2.0}, False),
    ],
)
def test_rotations_that_follow_a_texts_length_are_left_to_the_model(rope, sampled, kernels, build, use):
    model = build("llama", rope_parameters={"rope_theta": 10000.0, "original_max_position_embeddings": 16, **rope})
    assert (kernels.unsuited(model, use("sample")) is None) == sampled
    assert kernels.unsuited(model, use("train")) is None, "training asks the model's own rotations"


# The parts of these have the names of Llama's; their code differs: interleaved or partial rotations, multipliers, caps, gates,
# scales that grow with the position.
OTHERS = {
    "Arcee": None, "Cohere": None, "Cwm": "train", "Ernie4_5": None, "Gemma": None, "Gemma2": None, "Glm": None, "Granite": None,
    "Helium": None, "Ministral": "train", "Ministral3": None, "Mixtral": None, "Olmo": None, "Olmo2": None, "Phi3": None,
    "SeedOss": None, "SmolLM3": None, "StableLm": None,
}  # fmt: skip
"""Family → what it is suited to."""


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_are_what_their_code_is(family, kernels, use):
    config = getattr(hf, f"{family}Config", None)
    if config is None:
        pytest.skip(f"this transformers has no {family}")
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config(**TINY), attn_implementation="sdpa").eval().float()
    suited = {purpose for purpose in ("train", "sample") if kernels.unsuited(model, use(purpose)) is None}
    assert suited == ({OTHERS[family]} - {None})
    if "train" in suited:
        for shared in (False, True):
            inputs, places = model_inputs([[1, 2, 3], [1, 2, 3], [5]], [[4, 5, 6, 7], [8], [9] * 12], shared=shared)
            twin = kernels.twin(model, use("train"))
            ours, own = (one.base_model(**inputs).last_hidden_state.flatten(0, 1)[places] for one in (twin, model))
            torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-5)


def test_the_entry_point_takes_no_options(kernels):
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        type(kernels).Options(fast=True)
