"""Blocks made as Llama's are, so that their arithmetic can be done otherwise."""

from __future__ import annotations

from typing import Any

from torch import nn

KINDS = {"llama", "mistral", "qwen2", "qwen3"}
"""``model_type`` of models whose code is known to be this at every length; a trial on a few tokens cannot tell."""
BLOCK = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
"""Norms of queries and keys, which Qwen3 has."""
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def is_llama_block(block: Any) -> bool:
    """Whether it holds just the parts of a Llama's block: plain linear maps, biases at most on queries, keys and values alike."""
    if not made_of(block, BLOCK) or not made_of(block.mlp, MLP):
        return False
    attention, mlp = block.self_attn, block.mlp
    if not made_of(attention, ATTENTION) and not made_of(attention, ATTENTION | HEAD_NORMS):
        return False
    qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
    others = [attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return (
        all(type(one) is nn.Linear for one in [*qkv, *others])
        and len({one.bias is None for one in qkv}) == 1
        and all(one.bias is None for one in others)
        and all(is_norm(norm) for norm in norms_of(block))
    )


def norms_of(block: Any) -> list[Any]:
    attention = block.self_attn
    heads = [getattr(attention, name) for name in sorted(HEAD_NORMS) if hasattr(attention, name)]
    return [block.input_layernorm, block.post_attention_layernorm, *heads]


def is_norm(module: Any) -> bool:
    """Whether it is written as transformers' root-mean-square norms are."""
    return isinstance(getattr(module, "variance_epsilon", None), float)


def made_of(module: nn.Module, names: set[str]) -> bool:
    return {name for name, _ in module.named_children()} == names
