"""Models that are Llamas by their parts and by their code; a trial on a few rows cannot show results at other lengths.

``transformers`` writes the same functions out once for each family, so code that is equal to that of a family in ``FAMILIES``
computes the same: rotations, multipliers, caps and masks are all in it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import nn

from rlhf_host.protocols import Use

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""Prefixes of classes of transformers whose computation is written again in ``blocks`` and ``decode``."""
WIDEST = 1024
"""Largest hidden size for which training gains: in wider models the products take nearly all the time, and the folded weights
take memory.
"""
FIXED_ROTATIONS = {"default", "linear", "llama3", "yarn"}
"""Kinds of rotary positions whose frequencies do not depend on the length of a text."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def unsuited(model: nn.Module, use: Use) -> str | None:
    """Returns why a model is not for this package, in a few words; None: try it."""
    return next(_reasons(model, use), None)


def _reasons(model: Any, use: Use) -> Iterator[str]:
    if use.device.type != "cpu":
        yield "it is for CPUs"
    if use.autocast is not None or any(one.dtype != torch.float32 or one.device.type != "cpu" for one in model.parameters()):
        yield "it computes in float32, on CPUs"
    if use.even_passes:
        yield "the order of its gradients depends on the layout of a pass"
    decoder = getattr(model, "base_model", None)
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList) or not len(decoder.layers):
        yield "the model is not made as Llama is"
    if decoder.config._attn_implementation != "sdpa":
        yield f"attention is {decoder.config._attn_implementation}, not sdpa"
    for name, module in decoder.layers.named_modules():
        if _is_changed(module):
            yield f"layers.{name} has hooks or a forward of its own"
    for number, layer in enumerate(decoder.layers):
        if part := _foreign_part(layer):
            yield f"the {part} of layer {number} is not Llama's"
    if not _is_written_as(decoder.rotary_emb, "RotaryEmbedding"):
        yield "its rotary positions are not Llama's"
    yield from _why_not_train(decoder) if use.purpose == "train" else _why_not_sample(model, decoder)


def _why_not_train(decoder: Any) -> Iterator[str]:
    if decoder.config.hidden_size > WIDEST:
        yield f"nothing is gained beyond a hidden size of {WIDEST}"
    if any(type(layer.mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation") for layer in decoder.layers):
        yield "its MLPs have an activation other than silu"


def _why_not_sample(model: Any, decoder: Any) -> Iterator[str]:
    if not _is_written_as(model, "ForCausalLM") or not _is_written_as(decoder, "Model"):
        yield "the model is not a Llama for causal language modelling"
    head, embedding = model.get_output_embeddings(), decoder.embed_tokens
    # Gradient checkpointing leaves a hook on the embedding, which changes no value.
    if any(map(_is_changed, (model, decoder, decoder.norm, head))):
        yield "the model has hooks or a forward of its own"
    if type(head) is not nn.Linear or head.bias is not None or type(embedding) is not nn.Embedding or embedding.max_norm:
        yield "its head is not a plain product, or its embedding not a plain table"
    if decoder.rotary_emb.rope_type not in FIXED_ROTATIONS:
        yield f"rotary positions of kind {decoder.rotary_emb.rope_type} follow the length of a text"


def _foreign_part(layer: Any) -> str | None:
    """Returns the part of a block that is not a plain linear map or norm in Llama's code; only queries, keys and values may
    have biases.
    """
    if not _is_written_as(layer, "DecoderLayer"):
        return "code"
    attention, mlp = layer.self_attn, layer.mlp
    if not _is_written_as(attention, "Attention"):
        return "attention"
    if not _is_written_as(mlp, "MLP"):
        return "MLP"
    if not all(_is_written_as(norm, "RMSNorm") for norm in _norms_of(layer)):
        return "norm"
    projections = [getattr(attention, name) for name in PROJECTIONS]
    others = [attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    if any(type(one) is not nn.Linear for one in (*projections, *others)):
        return "product"
    if len({one.bias is None for one in projections}) > 1 or any(one.bias is not None for one in others):
        return "bias"
    return None


def _norms_of(layer: Any) -> list[Any]:
    heads = [getattr(layer.self_attn, name) for name in ("q_norm", "k_norm") if hasattr(layer.self_attn, name)]
    return [layer.input_layernorm, layer.post_attention_layernorm, *heads]


def _is_changed(module: nn.Module) -> bool:
    """Returns True if calling it does anything other than its class's forward."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return any(hooks) or "forward" in vars(module)


# --- code ---------------------------------------------------------------------------------------


def _is_written_as(module: nn.Module, part: str) -> bool:
    """Returns True if its forward equals, instruction by instruction, that of the part of this name in one of ``FAMILIES``."""
    return isinstance(type(module).forward, FunctionType) and _code(type(module).forward) in _families(part)


@cache
def _families(part: str) -> list[tuple[Any, ...]]:
    def forward(family: str) -> FunctionType:
        name = family.lower()
        return getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), f"{family}{part}").forward

    return [_code(forward(family)) for family in FAMILIES]


@cache
def _code(function: FunctionType) -> tuple[Any, ...]:
    """Returns the code of a function: its instructions, and those of the functions of its own module that it calls."""
    plain = inspect.unwrap(function)
    code, around = plain.__code__, plain.__globals__
    called = (around[name] for name in code.co_names if name in around)
    inner = [_code(one) if isinstance(one, FunctionType) and one.__module__ == plain.__module__ else id(one) for one in called]
    # The first constant is the docstring, or None.
    return code.co_code, code.co_names, code.co_consts[1:], tuple(inner)
