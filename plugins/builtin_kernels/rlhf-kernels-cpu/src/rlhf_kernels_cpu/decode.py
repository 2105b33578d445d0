"""Llamas sampled on CPUs in few operators: the cost of a decoding step of a small model is their number.

Queries, keys and values are one product, gate and up another. The norms' weights (times √D, which makes a root mean square of a
length) and the scale of the attention are folded into them. Rotary positions are one complex product: the two halves of a
query's and a key's head are interleaved for it, both alike, so their products stay the same.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_kernels_cpu.prefix_cache import PrefixCache, attend_next, attend_prompts
from rlhf_kernels_cpu.products import has_onednn, pack, packed_product

PREFILL_TOKENS = 8192
"""Padded tokens of one prefill pass, which bound its activations."""
PACKED = 1 << 16
"""Elements of a weight below which the plain product is as fast as one with a packed weight."""


class LlamaDecoder:
    """A ``Decoder`` from weights that ``refresh`` derives from the model's own, float32 on a CPU."""

    ragged = True

    def __init__(self, model: Any) -> None:
        decoder, head = model.base_model, model.get_output_embeddings()
        windows = _windows(decoder.config)
        self._embedding: Tensor = decoder.embed_tokens.weight
        self._rotary = copy.deepcopy(decoder.rotary_emb)
        self._least = _least_length(decoder.norm)
        self._blocks = [_Block(block, window) for block, window in zip(decoder.layers, windows, strict=True)]
        self._head = _Product(lambda: head.weight * _folded(decoder.norm))
        self._turns = torch.empty(0, dtype=torch.complex64)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        for block in self._blocks:
            block.refresh()
        self._head.refresh()

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        self._cache = PrefixCache([len(prompt) for prompt in prompts])
        order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
        pieces, begin = [], 0
        while begin < len(order):
            count = max(1, PREFILL_TOKENS // len(prompts[order[begin]]))
            pieces.append(self._prefill(order[begin : begin + count], prompts))
            begin += count
        return torch.cat(pieces)[torch.tensor(order).argsort()]

    def _prefill(self, numbers: list[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        width = len(prompts[numbers[0]])
        ids = torch.tensor([[*prompts[number], *[0] * (width - len(prompts[number]))] for number in numbers])
        places = torch.tensor(numbers)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
            self._cache.hold_prompts(layer, places, key, value)
            return attend_prompts(query, key, value, window)

        hidden = self._hidden(ids, self._rotations(width)[:width, None], attend)
        return self._logits(hidden[torch.arange(len(numbers)), self._cache.prompt_lens[places] - 1])

    def start(self, prompt_of_row: Tensor, longest: int) -> None:
        self._positions = self._cache.prompt_lens[prompt_of_row, None]
        self._cache.start(prompt_of_row, longest)
        self._rotations(self._cache.width + longest)

    def step(self, tokens: Tensor) -> Tensor:
        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
            self._cache.append(layer, key, value)
            return attend_next(self._cache, layer, query, window)

        hidden = self._hidden(tokens[:, None], self._turns[self._positions][:, :, None], attend)
        logits = self._logits(hidden[:, 0])
        self._cache.advance()
        self._positions = self._positions + 1
        return logits

    def keep(self, rows: Tensor) -> None:
        self._positions = self._positions[rows]
        self._cache.keep(rows)

    def _rotations(self, positions: int) -> Tensor:
        """Returns ``[positions or more, D / 2]`` complex: the rotation of each pair at each position."""
        if len(self._turns) < positions:
            cos, sin = self._rotary(self._embedding[:1], torch.arange(positions)[None])
            half = cos.shape[-1] // 2
            self._turns = torch.complex(cos[0, :, :half], sin[0, :, :half])
        return self._turns

    def _hidden(self, ids: Tensor, turns: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Converts ``ids`` ``[B, T]`` and their rotations (``[B, T, 1, D / 2]`` or a shape that broadcasts to it) to ``[B, T,
        H]``.

        Args:
            attend: ``(layer, query, key, value, window)``, ``[B, heads or kv, T, D]`` → ``[B, T, heads, D]``.
        """
        rows, length = ids.shape
        x = F.embedding(ids.flatten(), self._embedding)
        for number, block in enumerate(self._blocks):
            turned = block.heads + block.kv
            qkv = block.qkv(_unit(x, block.least)).view(rows, length, turned + block.kv, block.depth)
            if block.head_norms is not None:
                qkv[:, :, :turned] = _unit(qkv[:, :, :turned], block.least_head) * block.head_norms
            torch.view_as_complex(qkv[:, :, :turned].unflatten(-1, (-1, 2))).mul_(turns)
            query, key, value = qkv.transpose(1, 2).split((block.heads, block.kv, block.kv), 1)
            attended = attend(number, query, key, value, block.window)
            block.out.add_to(x, attended.reshape(rows * length, -1))
            gate, up = block.gate_up(_unit(x, block.least_between)).chunk(2, -1)
            block.down.add_to(x, block.activation(gate).mul_(up))
        return x.view(rows, length, -1)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Converts ``[B, H]`` to ``[B, V]``."""
        return self._head(_unit(hidden, self._least))


class _Block:
    def __init__(self, block: Any, window: int | None) -> None:
        attention, mlp = block.self_attn, block.mlp
        before, between = block.input_layernorm, block.post_attention_layernorm
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        self.depth = depth = attention.head_dim
        self.heads, self.kv = heads, kv = q.out_features // depth, k.out_features // depth
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
        """``[heads + kv, D]`` if queries and keys have their own norms."""
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
            self.head_norms = self._make_head_norms()


class _Product:
    """``x · weightᵀ + bias`` with a weight ``[out, in]`` that ``make`` derives anew after every change."""

    def __init__(self, make: Callable[[], Tensor], make_bias: Callable[[], Tensor] | None = None) -> None:
        self.make, self.make_bias = make, make_bias
        self.weight = torch.empty(0)
        self.bias: Tensor | None = None
        self.packed = False

    def refresh(self) -> None:
        weight = self.make().detach()
        self.bias = None if self.make_bias is None else self.make_bias().detach()
        self.packed = weight.numel() >= PACKED and has_onednn()
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


def _unit(x: Tensor, least: Tensor) -> Tensor:
    """Returns ``x / sqrt(|x|² + least²)``: a root-mean-square norm without its weight and √D."""
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(least)


def _least_length(norm: Any) -> Tensor:
    return torch.tensor(math.sqrt(norm.variance_epsilon * len(norm.weight)))


def _folded(norm: Any) -> Tensor:
    return norm.weight * math.sqrt(len(norm.weight))


def _windows(config: Any) -> list[int | None]:
    """Returns the sliding window of each layer."""
    window = getattr(config, "sliding_window", None)
    kinds = (
        getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    )
    return [window if kind == "sliding_attention" else None for kind in kinds]
