"""Every causal language model that transformers ships, small enough to be built in a blink."""

from __future__ import annotations

from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCABULARY = 61
WINDOW = 16
"""Of sliding, chunked and sparse attention: some rows of the tests are longer, some are not."""

WIDTH, HEADS, HEAD = 32, 4, 8

SIZES = (
    (WIDTH, "hidden_size n_embd d_model embed_dim emb_dim embedding_dim embedding_size word_embed_proj_dim lru_width"),
    (WIDTH, "hidden_size_global"),
    (48, "intermediate_size ffn_dim d_ff n_inner ffn_hidden_size encoder_ffn_dim decoder_ffn_dim dff dim_ff d_inner"),
    (48, "feed_forward_size mlp_dim shared_intermediate_size"),
    (16, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size dense_intermediate_size"),
    (16, "moe_shared_expert_intermediate_size intermediate_size_mlp"),
    (2, "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers num_encoder_layers"),
    (2, "num_decoder_layers num_blocks depth num_layers_per_stack"),
    (HEADS, "num_attention_heads n_head num_heads n_heads attention_heads encoder_attention_heads decoder_attention_heads"),
    (HEADS, "num_encoder_attention_heads num_decoder_attention_heads"),
    (2, "num_key_value_heads num_kv_heads multi_query_group_num linear_num_key_heads linear_num_value_heads linear_num_heads"),
    (HEAD, "head_dim dim_head d_head attention_head_size index_head_dim kv_channels q_lora_rank kv_lora_rank o_lora_rank"),
    (HEAD, "qk_nope_head_dim qk_rope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim"),
    (HEAD, "mamba_d_head query_pre_attn_scalar hidden_size_per_layer_input"),
    (4, "rotary_dim mamba_d_state state_size ssm_state_size mamba_dt_rank time_step_rank"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok num_experts_per_token moe_k moe_topk moe_top_k top_k_experts"),
    (1, "n_group topk_group num_expert_group first_k_dense_replace"),
    (WINDOW, "sliding_window attention_chunk_size attention_window_size window_size local_attention sliding_window_size"),
    (WINDOW, "keep_window_size index_topk"),
    (16, "index_n_heads"),  # so many that no two tokens are worth exactly nothing to all of them
    (128, "max_position_embeddings n_positions max_seq_len n_ctx max_target_positions"),
    (8, "mamba_chunk_size chunk_size block_size image_size patch_size output_channels"),
    (0.5, "final_logit_softcapping logits_soft_cap output_logit_soft_cap residual_multiplier lm_head_multiplier"),
    (0.1, "attn_logit_softcapping"),
    (2.0, "logits_scaling embedding_multiplier attention_multiplier"),
    (VOCABULARY, "vocab_size vocab_size_per_layer_input"),
    (0, "pad_token_id"),
    (1, "bos_token_id decoder_start_token_id"),
    (2, "eos_token_id"),
    (None, "forced_eos_token_id"),
    (True, "is_decoder"),
)
"""By the names that configurations have for sizes."""

SLIDING, LINEAR = ({"layer_types": [kind, "full_attention"]} for kind in ("sliding_attention", "linear_attention"))
LATER_SLIDING = {"use_sliding_window": True, "max_window_layers": 1}
SHARED_KEYS = {"layer_types": 2 * SLIDING["layer_types"], "num_hidden_layers": 4, "num_kv_shared_layers": 2}
ZAMBA = {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}


def long_rope(window: int) -> dict[str, Any]:
    """Settings of rotary positions that change for rows longer than ``window``."""
    return {
        "sliding_window": None,
        "original_max_position_embeddings": window,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "original_max_position_embeddings": window,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 3.0, 5.0, 8.0],
        },
    }


SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "gemma3_text", "laguna"), SLIDING),
    "gemma4_text": SHARED_KEYS | {"global_head_dim": 2 * HEAD, "enable_moe_block": True},
    "gemma4_unified_text": SLIDING | {"global_head_dim": 2 * HEAD},
    "gemma4_vision": {"position_embedding_size": 64},
    "gemma4_unified_vision": {"mm_embed_dim": WIDTH, "mm_posemb_size": 16, "output_proj_dims": WIDTH},
    "phi4_multimodal_audio": {"nemo_conv_channels": 8, "ext_pw_out_channel": WIDTH, "depthwise_separable_out_channel": WIDTH},
    **dict.fromkeys(("mellum", "ministral", "olmo3"), SLIDING),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), LATER_SLIDING),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"), LINEAR),
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": SLIDING
    | {"rope_parameters": {kind: {"rope_theta": 1e4, "mrope_section": [1, 1, 2]} for kind in SLIDING["layer_types"]}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 1.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_top_k": 2},
    },
    "deepseek_v4": {
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "num_hidden_layers": 3,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "index_topk": 4,
        "partial_rotary_factor": 0.5,
        "o_groups": 2,
    },
    "dots1": SLIDING | {"n_shared_experts": 1},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "gemma3n_text": SHARED_KEYS | {"laurel_rank": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": MAMBA | LINEAR,
    "inkling_text": {
        "layer_types": ["hybrid_sliding", "hybrid"],
        "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": HEAD,
        "rel_extent": 32,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": LINEAR,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4_text": {"no_rope_layers": [1, 0], "moe_layers": [1], "floor_scale": 8},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse", "full_attention"],
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "hc_lowrank": 4,
        "ple_layer_ids": [1],
        "ngram_vocab_size_base": 100,
        "split_ngram_parts": 1,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD,
        "indexer_budget": WINDOW,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"axial_pos_shape": [16, 8], "axial_pos_embds_dim": [16, 16], "attn_layers": ["local", "lsh"]},
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 24},
    "roc_bert": {
        "pronunciation_embed_dim": 16,
        "pronunciation_vocab_size": VOCABULARY,
        "shape_embed_dim": 16,
        "shape_vocab_size": VOCABULARY,
    },
    "smollm3": {"use_sliding_window": True, "no_rope_layers": [1, 0]},
    "xmod": {"default_language": "en_XX"},
    **dict.fromkeys(("zamba", "zamba2"), ZAMBA),
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"], "router_hidden_size": 8},
}
"""What single families need beside: sizes that have to fit each other."""

OUTSIDE = {
    "gemma3n": "its vision tower needs timm; its text part is gemma3n_text",
    "gemma4_assistant": "drafts from another model's hidden states",
    "gemma4_unified_assistant": "drafts from another model's hidden states",
    "musicgen": "several streams of audio tokens",
    "musicgen_melody": "several streams of audio tokens",
    "reformer": "has gradients in training mode alone, where its hashing is random",
}
"""Families that are no language model over text alone, and why."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert-bidirectional": ("bert", {"is_decoder": False}),
    "doge-moe": ("doge", {"is_moe": True}),  # its router mixes up a row's tokens
    "gemma2-eager": ("gemma2", {"attn_implementation": "eager"}),
    "phi3-long-rope": ("phi3", long_rope(WINDOW)),
}
"""Settings of a family that change what is computed: name → family, what is set."""


def families() -> dict[str, type[PreTrainedConfig]]:
    """``model_type`` → configuration, of everything that ``AutoModelForCausalLM`` builds."""
    return {cls.model_type: cls for cls in MODEL_FOR_CAUSAL_LM_MAPPING}


def miniature(name: str, **settings: Any) -> PreTrainedModel:
    """A model of the family or variant, with these settings beside its own and weights that make every part matter."""
    model_type, changes = VARIANTS.get(name, (name, {}))
    changes = {**changes, **settings}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small(families()[model_type], **changes)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def small(cls: type[PreTrainedConfig], **changes: Any) -> PreTrainedConfig:
    fields = field_names(cls)
    named = {name: value for value, names in SIZES for name in names.split() if name in fields}
    if "kv_lora_rank" in fields:
        named["num_key_value_heads"] = HEADS
    for name, part in cls.sub_configs.items():
        if name in changes:
            continue
        if part is AutoConfig:
            part = type(getattr(cls(), name))
        if part is not type(None):
            named[name] = small(part)
    return cls(**{**named, **SPECIAL.get(cls.model_type, {}), **changes})


def field_names(cls: type[PreTrainedConfig]) -> set[str]:
    return set(getattr(cls, "__dataclass_fields__", ())) | set(cls.attribute_map)
