"""Blocks of Llamas on CPUs as two functions with their own gradients: attention and MLP, each with its norm and residual.
Beside the matrix products, operators that pass over all tokens cost the most, so there are few of them.

A norm's weight is folded into the products after it, and its gradient found from theirs. Queries, keys and values are one
product, gate and up another. Rotary positions are one complex product in place: the halves of a query's and a key's head are
interleaved for it, both alike, so their products stay the same.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlhf_host.protocols import SharedRows
from rlhf_kernels_cpu.products import product
from rlhf_kernels_cpu.rows import LONGEST, Blocks, LatestBlocks, RowAttention, attend, attend_backward, to_places

CACHES = {"cache", "past_key_values"}
"""Names of the argument that is a cache: the first since transformers 5.24."""
KNOWN = {"attention_mask", "position_ids", *CACHES, "use_cache", "position_embeddings", "shared_rows"}
"""Arguments of a block that are accepted here, a cache only as None."""


class AttentionHalf(torch.autograd.Function):
    """``x + attention(norm(x))`` of a shared-prefix line ``x`` ``[N, H]``, float32."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        turns: Tensor,
        blocks: Blocks,
        scale: float,
        epsilon: float,
        *biases: Tensor,
    ) -> Tensor:
        """Computes the function. ``turns`` ``[N, 1, D / 2]`` complex: every token's rotation. ``biases``: of queries, keys and
        values, or none.
        """
        depth = 2 * turns.shape[-1]
        turned = len(query) + len(key)
        order = _interleaved(turned, len(value), depth)
        joined = torch.cat([query, key, value])[order].mul_(norm)
        bias = torch.cat(biases)[order] if biases else None
        flat, inverse_length = normalize(x, epsilon)
        lines = product(flat, joined, bias).view(len(x), -1, depth)
        _turn(lines, turned // depth, turns)
        heads = [len(weight) // depth for weight in (query, key, value)]
        q, k, v = to_places(blocks, *lines.split(heads, 1))
        attended, probabilities = attend(q, k, v, blocks, scale)
        attended = attended.view(len(x), -1)
        ctx.save_for_backward(
            flat, inverse_length, joined, norm, query, key, value, out, turns, attended, q, k, v, *probabilities
        )
        ctx.blocks, ctx.scale, ctx.order, ctx.has_bias = blocks, scale, order, bias is not None
        return product(attended, out).add_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        flat, inverse_length, joined, norm, query, key, value, out, turns, attended, q, k, v, *probabilities = ctx.saved_tensors
        depth = 2 * turns.shape[-1]
        of_out = torch.mm(gradient.t(), attended)
        of_attended = product(gradient, out.t())
        of_lines = torch.cat(attend_backward(of_attended, q, k, v, probabilities, ctx.blocks, ctx.scale), 1)
        turned = len(query) + len(key)
        _turn(of_lines, turned // depth, turns.conj().resolve_conj())
        of_products = of_lines.view(len(flat), -1)
        of_joined = _put_back(torch.mm(of_products.t(), flat), ctx.order)
        of_norm = torch.cat([query, key, value]).mul_(of_joined).sum(0)
        sizes = (len(query), len(key), len(value))
        of_query, of_key, of_value = of_joined.mul_(norm).split(sizes)
        of_biases = _put_back(of_products.sum(0), ctx.order).split(sizes) if ctx.has_bias else ()
        of_x = _through_norm(product(of_products, joined.t()), flat, inverse_length).add_(gradient)
        return of_x, of_norm, of_query, of_key, of_value, of_out, None, None, None, None, *of_biases


class MlpHalf(torch.autograd.Function):
    """``x + down(silu(gate) · up)`` of ``x`` ``[N, H]``, float32, with ``gate`` and ``up`` after the norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, epsilon: float) -> Tensor:
        joined = torch.cat([gate, up]).mul_(norm)
        flat, inverse_length = normalize(x, epsilon)
        both = product(flat, joined)
        opened, raised = both.chunk(2, -1)
        opening = F.silu(opened)
        inner = opening * raised
        ctx.save_for_backward(flat, inverse_length, joined, norm, gate, up, down, both, opening, inner)
        return product(inner, down).add_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        flat, inverse_length, joined, norm, gate, up, down, both, opening, inner = ctx.saved_tensors
        opened, raised = both.chunk(2, -1)
        of_down = torch.mm(gradient.t(), inner)
        of_inner = product(gradient, down.t())
        of_both = torch.empty_like(both)
        of_opened, of_raised = of_both.chunk(2, -1)
        torch.mul(of_inner, opening, out=of_raised)
        torch.ops.aten.silu_backward.grad_input(of_inner.mul_(raised), opened, grad_input=of_opened)
        of_joined = torch.mm(of_both.t(), flat)
        of_norm = torch.cat([gate, up]).mul_(of_joined).sum(0)
        of_gate, of_up = of_joined.mul_(norm).chunk(2)
        of_x = _through_norm(product(of_both, joined.t()), flat, inverse_length).add_(gradient)
        return of_x, of_norm, of_gate, of_up, of_down, None


def normalize(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Returns ``x / sqrt(mean(x²) + epsilon)`` over the last dimension, and the factor of ``x``."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = norm.square_().mul_(1 / x.shape[-1]).add_(epsilon).rsqrt_()
    return x * scale, scale


@cache
def _interleaved(turned: int, rest: int, depth: int) -> Tensor:
    """Returns the order of rows in which the pairs that rotate together are adjacent."""
    heads = torch.arange(turned).view(-1, 2, depth // 2).transpose(1, 2).flatten()
    return torch.cat([heads, torch.arange(turned, turned + rest)])


def _put_back(rows: Tensor, order: Tensor) -> Tensor:
    return torch.empty_like(rows).index_copy_(0, order, rows)


def _turn(lines: Tensor, heads: int, turns: Tensor) -> None:
    torch.view_as_complex(lines[:, :heads].unflatten(-1, (-1, 2))).mul_(turns)


def _through_norm(gradient: Tensor, flat: Tensor, inverse_length: Tensor) -> Tensor:
    """Returns the gradient of ``x``, for ``flat = x · inverse_length``, from that of ``flat``; written over it."""
    along = (gradient * flat).sum(-1, keepdim=True).mul_(-1 / flat.shape[-1])
    return gradient.addcmul_(flat, along).mul_(inverse_length)


# --- in a twin ----------------------------------------------------------------------------------


def fuse_blocks(twin: Any) -> nn.Module:
    """Makes the blocks of a twin, whose modules belong to nothing else, compute in the two functions. Returns the twin."""
    latest, decoder = LatestBlocks(), twin.base_model
    for layer in decoder.layers:
        if not isinstance(layer, FusedBlock):
            layer.__class__ = _fused(type(layer))
            layer.latest = latest
    return twin


@cache
def _fused(cls: type[nn.Module]) -> type[nn.Module]:
    return type(f"Fused{cls.__name__}", (FusedBlock, cls), {})


class FusedBlock(nn.Module):
    """A block in two functions. Its parts keep their names, and it works as before if it is asked for more."""

    latest: LatestBlocks

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        cached = any(options.get(name) is not None for name in CACHES)
        if args or cached or not options.keys() <= KNOWN or not self._takes(hidden_states):
            return super().forward(hidden_states, *args, **options)
        attention, mlp, between = self.self_attn, self.mlp, self.post_attention_layernorm
        rows = options.get("shared_rows")
        if rows is None or rows.length > LONGEST * attention.head_dim:
            x = hidden_states + attention(hidden_states=self.input_layernorm(hidden_states), **options)[0]
            x = x.flatten(0, -2)
        else:
            attend_rows = self._attend_rows_normed if hasattr(attention, "q_norm") else self._attend_rows
            x = attend_rows(hidden_states.flatten(0, -2), rows, *options["position_embeddings"])
        weights = (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
        return MlpHalf.apply(x, between.weight, *weights, between.variance_epsilon).view_as(hidden_states)

    def _takes(self, hidden_states: Tensor) -> bool:
        if self.self_attn.training and self.self_attn.attention_dropout:
            return False
        return hidden_states.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")

    def _blocks_of(self, rows: SharedRows) -> Blocks:
        return self.latest.of(rows, self.self_attn.k_proj.out_features // self.self_attn.head_dim)

    def _attend_rows(self, x: Tensor, rows: SharedRows, cos: Tensor, sin: Tensor) -> Tensor:
        """Computes attention. ``x`` ``[N, H]``; ``cos`` and ``sin`` ``[1, N, D]``, whose halves are the same."""
        attention, before = self.self_attn, self.input_layernorm
        half = attention.head_dim // 2
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        return AttentionHalf.apply(
            x,
            before.weight,
            *(one.weight for one in projections),
            attention.o_proj.weight,
            torch.complex(cos[0, :, None, :half], sin[0, :, None, :half]),
            self._blocks_of(rows),
            attention.scaling,
            before.variance_epsilon,
            *(one.bias for one in projections if one.bias is not None),
        )

    def _attend_rows_normed(self, x: Tensor, rows: SharedRows, cos: Tensor, sin: Tensor) -> Tensor:
        """Computes the same if queries and keys have their own norms, which nothing can be folded through."""
        attention, flat = self.self_attn, self.input_layernorm(x)
        q, k, v = (
            one(flat).unflatten(-1, (-1, attention.head_dim)) for one in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = (_rotate(one, cos[0, :, None], sin[0, :, None]) for one in (attention.q_norm(q), attention.k_norm(k)))
        return x + attention.o_proj(RowAttention.apply(q, k, v, self._blocks_of(rows), attention.scaling).flatten(1))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
