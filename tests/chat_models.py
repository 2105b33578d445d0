"""Tiny byte-level models with a chat template."""

from __future__ import annotations

from pathlib import Path

import torch
from rlhf_authoring.models import TOOLS_TEMPLATE as QWEN
from transformers import LlamaConfig, LlamaForCausalLM

from tests.data.conftest import byte_tokenizer


def save_chat_model(folder: Path, *, hidden: int = 32, layers: int = 1, context: int = 32768) -> Path:
    """A model with Qwen's form of tools, and weights of its own seed."""
    tokenizer = byte_tokenizer(QWEN)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=hidden,
        intermediate_size=max(64, hidden),
        num_hidden_layers=layers,
        num_attention_heads=hidden // 16 if hidden < 64 else 4,
        num_key_value_heads=1 if hidden < 64 else 2,
        max_position_embeddings=context,
        bos_token_id=0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
