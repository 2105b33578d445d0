"""Tiny Llamas of every family, and the uses they are put to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from rlhf_kernels_cpu import CPUKernels, Options

from rlhf_host.protocols import Use

torch.set_num_threads(1)

SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "attn_implementation": "sdpa", "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "llama": lambda **changes: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES | changes)),
    "mistral": lambda **changes: hf.MistralForCausalLM(hf.MistralConfig(**SIZES | {"sliding_window": 5} | changes)),
    "qwen2": lambda **changes: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES | {"tie_word_embeddings": True} | changes)),
    "qwen3": lambda **changes: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES | {"head_dim": 16} | changes)),
    "scalar": lambda **changes: hf.LlamaForSequenceClassification(hf.LlamaConfig(**SIZES | {"num_labels": 1} | changes)),
}


def build_model(kind: str, **changes: Any) -> Any:
    """Weights far from uniform, so that a wrong mask, position or norm shows."""
    torch.manual_seed(0)
    model = MODELS[kind](**changes)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight)) if weight.dim() == 1 else weight.mul_(6)
    return model.eval()


def use_to(purpose: str, **changes: Any) -> Use:
    settings = {"purpose": purpose, "device": torch.device("cpu"), "dtype": torch.float32, "autocast": None}
    return Use(**settings | changes)


@pytest.fixture(name="build")
def _build():
    return build_model


@pytest.fixture(name="use")
def _use():
    return use_to


@pytest.fixture
def kernels() -> CPUKernels:
    return CPUKernels(Options())
