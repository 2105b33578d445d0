"""A CPU as a device of graphs, with the stand-in for them, and tiny models."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from rlhf_kernels_graphs import GraphKernels, Options
from rlhf_kernels_graphs.capture import CAPTURES

from rlhf_host.protocols import Use

from . import recorded

torch.set_num_threads(1)

SIZES = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 200, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "llama": lambda **changes: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES | changes)),
    "qwen2": lambda **changes: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES | {"tie_word_embeddings": True} | changes)),
    "mistral": lambda **changes: hf.MistralForCausalLM(hf.MistralConfig(**SIZES | {"sliding_window": 5} | changes)),
    "gemma3": lambda **changes: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**SIZES | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6} | changes)
    ),
    "gpt2": lambda **changes: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=200, bos_token_id=1, eos_token_id=2)
    ),
    "mixtral": lambda **changes: hf.MixtralForCausalLM(
        hf.MixtralConfig(**SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2} | changes)
    ),
}


@pytest.fixture(autouse=True)
def _graphs_on_cpus(monkeypatch):
    monkeypatch.setitem(CAPTURES, "cpu", recorded.record)
    recorded.GRAPHS.clear()


@pytest.fixture
def build():
    def make(kind, **changes):
        """Weights far from uniform, so that a wrong mask, position or norm shows."""
        torch.manual_seed(0)
        model = MODELS[kind](**changes)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.3 * torch.randn_like(weight)) if weight.dim() == 1 else weight.mul_(6)
        return model.eval()

    return make


def use_to(purpose="sample", **changes):
    return Use(**{"purpose": purpose, "device": torch.device("cpu"), "dtype": torch.float32, "autocast": None} | changes)


@pytest.fixture(name="use")
def _use():
    return use_to


@pytest.fixture
def kernels():
    return GraphKernels(Options())
