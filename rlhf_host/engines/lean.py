"""Llama-shaped models on CPUs in few operators: what a decoding step of a small model costs is their number.

Queries, keys and values are one product, gate and up another. The norms' weights (times √D, which makes a root mean square of a
length) and the scale of the attention are folded into them. Rotary positions are one complex product: the two halves of a query's
and a key's head are interleaved for it, both alike, so their products stay the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_host.engines.attention import SharedPrefixCache, decode_attention, prefill_attention
from rlhf_host.engines.packing import SMALLEST
from rlhf_host.models.llamas import KINDS, is_llama_block, is_norm, made_of
from rlhf_host.models.products import has_onednn, pack, packed_product

DECODER = {"embed_tokens", "layers", "norm", "rotary_emb"}
FIXED_ROTATIONS = {"default", "linear", "llama3", "yarn"}
"""Kinds of rotary positions whose frequencies do not depend on the length of a text."""


class LeanModel:
    """The decoder's arithmetic once more, from weights that ``refresh`` derives from the model's own.

    Whether a model of these modules computes just this is for the caller to try.
    """

    def __init__(self, model: PreTrainedModel, windows: dict[int, int | None]):
        decoder: Any = model.get_decoder()
        config = model.config.get_text_config()
        head: Any = model.get_output_embeddings()
        self.embedding: Tensor = decoder.embed_tokens.weight
        self.rotary = decoder.rotary_emb
        self.heads, self.kv = config.num_attention_heads, config.num_key_value_heads
        self.least = _least_length(decoder.norm)
        self.depth: int = decoder.layers[0].self_attn.v_proj.out_features // self.kv
        self.blocks = [_Block(block, self.depth, windows.get(number)) for number, block in enumerate(decoder.layers)]
        self.head = _Product(lambda: head.weight * _folded(decoder.norm))
        self._turns = torch.empty(0, self.depth // 2, dtype=torch.complex64)

    def refresh(self) -> None:
        """Derive all weights from the model's as they are now."""
        for block in self.blocks:
            block.refresh()
        self.head.refresh()

    def turns(self, positions: int) -> Tensor:
        """``[positions or more, D / 2]`` complex: the rotation of each pair at each position."""
        if len(self._turns) < positions:
            cos, sin = self.rotary(self.embedding[:1], torch.arange(positions)[None])
            self._turns = torch.complex(cos[0, :, : self.depth // 2].float(), sin[0, :, : self.depth // 2].float())
        return self._turns

    def hidden(self, ids: Tensor, turns: Tensor, cache: SharedPrefixCache) -> Tensor:
        """``ids`` ``[B, T]`` and their rotations (``[B, T, 1, D / 2]`` or what broadcasts to it) → ``[B, T, H]``."""
        rows, length = ids.shape
        both = self.heads + self.kv
        x = F.embedding(ids.flatten(), self.embedding)
        for number, block in enumerate(self.blocks):
            qkv = block.qkv(_unit(x, block.least)).view(rows, length, both + self.kv, self.depth)
            if block.head_norms is not None:
                qkv[:, :, :both] = _unit(qkv[:, :, :both], block.least_head) * block.head_norms
            torch.view_as_complex(qkv[:, :, :both].unflatten(-1, (-1, 2))).mul_(turns)
            query, key, value = qkv.transpose(1, 2).split((self.heads, self.kv, self.kv), 1)
            cache.update(key, value, number)
            if cache.prefilling:
                cache.windows[number] = block.window
                seen = prefill_attention(query, key, value, 1.0, block.window, None)
            else:
                seen = decode_attention(cache, query, 1.0, block.window, None)
            block.out.add_to(x, seen.reshape(rows * length, -1))
            gate, up = block.gate_up(_unit(x, block.least_between)).chunk(2, -1)
            block.down.add_to(x, block.activation(gate).mul_(up))
        return x.view(rows, length, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[B, H]`` → ``[B, V]``."""
        return self.head(_unit(hidden, self.least))


class _Block:
    def __init__(self, block: Any, depth: int, window: int | None):
        attention, mlp = block.self_attn, block.mlp
        before, between = block.input_layernorm, block.post_attention_layernorm
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        heads, kv = q.out_features // depth, k.out_features // depth
        scale = float(attention.scaling)
        normed_heads = hasattr(attention, "q_norm")
        # A scale before a norm would be lost in it.
        factors = torch.ones(q.out_features + k.out_features + v.out_features)
        if not normed_heads:
            factors[: q.out_features] = scale
        pairs = torch.arange(depth).view(2, -1).t().flatten()
        turned = torch.arange((heads + kv) * depth).view(-1, depth)[:, pairs].flatten()
        order = torch.cat([turned, torch.arange((heads + kv) * depth, (heads + 2 * kv) * depth)])

        def joined() -> Tensor:
            weight = torch.cat([q.weight, k.weight, v.weight])[order]
            return weight.mul_(_folded(before)).mul_(factors[:, None])

        def joined_bias() -> Tensor:
            return torch.cat([q.bias, k.bias, v.bias])[order].mul_(factors)

        self.window = window
        self.least, self.least_between = _least_length(before), _least_length(between)
        self.activation = mlp.act_fn
        self.qkv = _Product(joined, joined_bias if q.bias is not None else None)
        self.out = _Product(lambda: attention.o_proj.weight)
        self.gate_up = _Product(lambda: torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).mul_(_folded(between)))
        self.down = _Product(lambda: mlp.down_proj.weight)
        self.head_norms: Tensor | None = None
        """``[heads + kv, D]`` where queries and keys have norms of their own."""
        self._make_head_norms: Callable[[], Tensor] | None = None
        if normed_heads:
            self.least_head = _least_length(attention.q_norm)

            def head_norms() -> Tensor:
                query = (_folded(attention.q_norm) * scale)[pairs].expand(heads, -1)
                return torch.cat([query, _folded(attention.k_norm)[pairs].expand(kv, -1)])

            self._make_head_norms = head_norms

    def refresh(self) -> None:
        for product in (self.qkv, self.out, self.gate_up, self.down):
            product.refresh()
        if self._make_head_norms is not None:
            self.head_norms = self._make_head_norms().detach()


def _unit(x: Tensor, least: Tensor) -> Tensor:
    """``x / sqrt(|x|² + least²)``: a root-mean-square norm but for its weight and √D."""
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(least)


def _least_length(norm: Any) -> Tensor:
    return torch.tensor(math.sqrt(norm.variance_epsilon * len(norm.weight)))


def _folded(norm: Any) -> Tensor:
    return norm.weight * math.sqrt(len(norm.weight))


class _Product:
    """``x · weightᵀ + bias`` with a weight ``[out, in]`` that ``make`` derives anew after every change."""

    def __init__(self, make: Callable[[], Tensor], make_bias: Callable[[], Tensor] | None = None):
        self.make, self.make_bias = make, make_bias
        self.weight = torch.empty(0)
        self.bias: Tensor | None = None
        self.packed = False

    def refresh(self) -> None:
        weight = self.make().detach()
        self.bias = None if self.make_bias is None else self.make_bias().detach()
        self.packed = weight.numel() >= SMALLEST and has_onednn()
        self.weight = pack(weight) if self.packed else weight.t()

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            return packed_product(x, self.weight, self.bias)
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        if self.packed:
            residual.add_(packed_product(x, self.weight))
        else:
            residual.addmm_(x, self.weight)


def lean_model(model: PreTrainedModel, windows: dict[int, int | None]) -> LeanModel | None:
    """``None`` where the modules are not those of a Llama, or are not plain float32 linear maps and norms on a CPU."""
    decoder: Any = model.get_decoder()
    head: Any = model.get_output_embeddings()
    if model.config.model_type not in KINDS or not made_of(decoder, DECODER):
        return None
    if type(decoder.embed_tokens) is not nn.Embedding or decoder.rotary_emb.rope_type not in FIXED_ROTATIONS:
        return None
    if any(tensor.dtype != torch.float32 or tensor.device.type != "cpu" for tensor in model.parameters()):
        return None
    if type(head) is not nn.Linear or head.bias is not None or not is_norm(decoder.norm):
        return None
    return LeanModel(model, windows) if all(map(is_llama_block, decoder.layers)) else None
