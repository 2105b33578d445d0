"""Every causal language model that transformers ships, small enough to be built in a blink."""

from __future__ import annotations

from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCABULARY = 61
WINDOW = 16
"""Of sliding and chunked attention; rows of the tests are longer."""

WIDTH, HEADS, HEAD = 32, 4, 8

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "dim", "word_embed_proj_dim"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("expert_ffn_hidden_size", "ffn_hidden_size", "moe_shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "attention_window", "local_window_size"), WINDOW),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "index_head_dim"), HEAD),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_target_positions"), 128),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), HEAD),
    "head_dim": HEAD,
    "index_topk": 4,
    "index_n_heads": 2,
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "first_k_dense_replace": 1,
    "is_decoder": True,
}
"""By the names that configurations have for sizes."""

SPECIAL: dict[str, dict[str, Any]] = {}
"""What single families need beside: sizes that have to fit each other."""


def families() -> dict[str, type[PreTrainedConfig]]:
    """``model_type`` → configuration, of everything that ``AutoModelForCausalLM`` builds."""
    return {cls.model_type: cls for cls in MODEL_FOR_CAUSAL_LM_MAPPING}


def miniature(model_type: str, **changes: Any) -> PreTrainedModel:
    """A model of the family with weights that make every part matter."""
    cls = families()[model_type]
    named = {name: value for name, value in SMALL.items() if name in _fields(cls)}
    config = cls(**{**named, **SPECIAL.get(model_type, {}), **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def _fields(cls: type[PreTrainedConfig]) -> set[str]:
    return set(getattr(cls, "__dataclass_fields__", ())) | set(cls.attribute_map)
