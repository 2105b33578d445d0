"""Tiny models of many families, and a tokenizer of single characters."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

VOCABULARY = ["<pad>", "<bos>", "<eos>", *"0123456789+-*= \nabcdefghijkl"]
COMMON = dict(
    vocab_size=len(VOCABULARY),
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=96,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
GROUPED = dict(COMMON, num_key_value_heads=2)

MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED, tie_word_embeddings=True)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GROUPED, head_dim=16)),
    "mistral_window": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, sliding_window=5)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(
            **GROUPED, head_dim=8, query_pre_attn_scalar=8, sliding_window=5,
            attn_logit_softcapping=2.0, final_logit_softcapping=3.0,
        )
    ),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**GROUPED, head_dim=8, query_pre_attn_scalar=8, sliding_window=6)
    ),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=len(VOCABULARY), n_embd=32, n_layer=2, n_head=4, n_positions=96, eos_token_id=2)
    ),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**GROUPED)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2)),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(
            vocab_size=len(VOCABULARY), hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=96, word_embed_proj_dim=32, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
    ),
    "bloom": lambda: hf.BloomForCausalLM(
        hf.BloomConfig(vocab_size=len(VOCABULARY), hidden_size=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    ),
    "gpt_oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(**GROUPED, head_dim=8, sliding_window=5, num_local_experts=4, num_experts_per_tok=2)
    ),
    "mamba": lambda: hf.MambaForCausalLM(
        hf.MambaConfig(vocab_size=len(VOCABULARY), hidden_size=32, state_size=4, num_hidden_layers=2, eos_token_id=2)
    ),
}  # fmt: skip


def build(name: str):
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            # Far from uniform, so that a wrong mask or position shows.
            parameter.mul_(6.0) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    model.generation_config.eos_token_id = 2
    return model.eval()


@pytest.fixture
def tokenizer():
    from tokenizers import Tokenizer, decoders, models

    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(VOCABULARY)}, merges=[]))
    inner.decoder = decoders.Fuse()
    return hf.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


@pytest.fixture
def llama():
    return build("llama")


@pytest.fixture(name="build")
def _build():
    return build
