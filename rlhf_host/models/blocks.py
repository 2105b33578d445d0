"""Blocks of Llama-shaped models on CPUs as two functions with gradients of their own: attention and MLP, each with its norm and
residual. Operators that pass over all tokens are what costs beside the matrix products, so there are few of them.

A norm's weight is folded into the products after it, and its gradient found from theirs. Queries, keys and values are one product,
gate and up another. Rotary positions are one complex product in place: the halves of a query's and a key's head are interleaved
for it, both alike, so their products stay the same.
"""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlhf_host.models.layouts import enable_shared_rows, shared_layout
from rlhf_host.models.llamas import KINDS, is_llama_block
from rlhf_host.models.norms import is_fused_norm, normalize
from rlhf_host.models.products import product
from rlhf_host.models.row_attention import LONGEST, Blocks, attend, attend_backward, to_places

log = logging.getLogger(__name__)

WIDEST = 1024
"""Hidden sizes up to which this is done: in wider models the products are nearly all, and the folded weights take memory."""

KNOWN = {"attention_mask", "position_ids", "past_key_values", "use_cache", "position_embeddings", "shared_rows"}
"""Arguments of a block that it can be given here."""


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
        """``turns`` ``[N, 1, D / 2]`` complex: every token's rotation. ``biases``: of queries, keys and values, or none."""
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
        seen, kept = attend(q, k, v, blocks, scale)
        seen = seen.view(len(x), -1)
        ctx.save_for_backward(flat, inverse_length, joined, norm, query, key, value, out, turns, seen, q, k, v, *kept)
        ctx.blocks, ctx.scale, ctx.order, ctx.has_bias = blocks, scale, order, bias is not None
        return product(seen, out).add_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        flat, inverse_length, joined, norm, query, key, value, out, turns, seen, *rest = ctx.saved_tensors
        q, k, v, *kept = rest
        depth = 2 * turns.shape[-1]
        of_out = torch.mm(gradient.t(), seen)
        of_lines = torch.cat(attend_backward(product(gradient, out.t()), q, k, v, kept, ctx.blocks, ctx.scale), 1)
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


@cache
def _interleaved(turned: int, rest: int, depth: int) -> Tensor:
    """The order of rows in which the pairs that rotate together lie side by side."""
    heads = torch.arange(turned).view(-1, 2, depth // 2).transpose(1, 2).flatten()
    return torch.cat([heads, torch.arange(turned, turned + rest)])


def _put_back(rows: Tensor, order: Tensor) -> Tensor:
    return torch.empty_like(rows).index_copy_(0, order, rows)


def _turn(lines: Tensor, heads: int, turns: Tensor) -> None:
    torch.view_as_complex(lines[:, :heads].unflatten(-1, (-1, 2))).mul_(turns)


def _through_norm(gradient: Tensor, flat: Tensor, inverse_length: Tensor) -> Tensor:
    """The gradient of ``x``, where ``flat = x · inverse_length``, from that of ``flat``; written over it."""
    along = (gradient * flat).sum(-1, keepdim=True).mul_(-1 / flat.shape[-1])
    return gradient.addcmul_(flat, along).mul_(inverse_length)


# --- in a model ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Make:
    """What a block consists of, by which blocks that were tried are known again."""

    types: tuple[type, ...]
    parameters: int

    @classmethod
    def of(cls, block: nn.Module) -> _Make:
        return cls(tuple(type(part) for part in block.modules()), sum(1 for _ in block.parameters()))


def fuse_blocks(model: nn.Module) -> None:
    """Give the model's blocks this forward pass, wherever it is what they compute; only on CPUs, and only in float32.

    What holds for a block now may not later (an adapter, hooks that bring its weights): then it goes its own way.
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "model_type", None) not in KINDS or config.hidden_size > WIDEST or config.hidden_act != "silu":
        return
    if config._attn_implementation != "sdpa":
        return
    tried: dict[_Make, bool] = {}
    for block in model.modules():
        if is_llama_block(block) and "forward" not in vars(block):
            make = _Make.of(block)
            if make not in tried:
                tried[make] = _gives_the_same(block, make)
            if tried[make]:
                # A copy of the block gets a copy of this, and so its own weights.
                block.forward = partial(_forward, block, make)  # type: ignore[method-assign]


def release_blocks(model: nn.Module) -> None:
    """Have the model's blocks go their own way again.

    Backends that reduce gradients as they come need them in the same order on every rank; here it depends on a pass's layout.
    """
    for block in model.modules():
        if isinstance(way := vars(block).get("forward"), partial) and way.func is _forward:
            del block.forward


def _forward(self: Any, make: _Make, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
    if (
        args
        or not options.keys() <= KNOWN
        or options.get("past_key_values") is not None
        or not _fits(self, make, hidden_states)
    ):
        return type(self).forward(self, hidden_states, *args, **options)
    attention, mlp, before, between = self.self_attn, self.mlp, self.input_layernorm, self.post_attention_layernorm
    rows = options.get("shared_rows")
    if rows is not None and rows.length <= LONGEST * attention.head_dim and not hasattr(attention, "q_norm"):
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        cos, sin = (one[0, :, None, : attention.head_dim // 2] for one in options["position_embeddings"])
        x = AttentionHalf.apply(
            hidden_states.flatten(0, -2),
            before.weight,
            *(one.weight for one in projections),
            attention.o_proj.weight,
            torch.complex(cos, sin),
            rows.blocks(attention.k_proj.out_features // attention.head_dim),
            attention.scaling,
            before.variance_epsilon,
            *(one.bias for one in projections if one.bias is not None),
        )
    else:
        x = (hidden_states + attention(hidden_states=before(hidden_states), **options)[0]).flatten(0, -2)
    weights = (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
    return MlpHalf.apply(x, between.weight, *weights, between.variance_epsilon).view_as(hidden_states)


def _fits(block: Any, make: _Make, x: Tensor) -> bool:
    _, *parts = block.modules()
    if _Make.of(block) != make or not all(map(_is_untouched, parts)):
        return False
    if block.self_attn.training and block.self_attn.attention_dropout:
        return False
    if x.dtype != torch.float32 or torch.is_autocast_enabled(x.device.type):
        return False
    return all(weight.dtype == torch.float32 and weight.device.type == "cpu" for weight in block.parameters())


def _is_untouched(part: nn.Module) -> bool:
    """Whether calling it would do what its class says, and no more."""
    if part._forward_pre_hooks or part._forward_hooks or part._backward_pre_hooks or part._backward_hooks:
        return False
    return "forward" not in vars(part) or is_fused_norm(part)


def _gives_the_same(block: Any, make: _Make) -> bool:
    """Try both ways, forward and backward, on a few tokens, with weights that leave no doubt."""
    enable_shared_rows()
    with torch.inference_mode(False), torch.enable_grad():
        prompts, lengths, sharing = [[0, 0], [0, 0], [0, 0, 0], [0, 0]], [3, 1, 2, 0], [0, 0, 1, 0]
        layout = shared_layout(prompts, torch.zeros(sum(lengths), dtype=torch.int64), lengths, sharing)
        tokens, width, depth = layout.input_ids.shape[1], len(block.input_layernorm.weight), block.self_attn.head_dim
        generator = torch.Generator().manual_seed(0)
        angles = torch.rand(1, tokens, depth // 2, generator=generator).repeat(1, 1, 2)
        options = {**layout.inputs(), "position_embeddings": (angles.cos(), angles.sin())}
        del options["input_ids"]
        x = torch.randn(1, tokens, width, generator=generator).requires_grad_()
        if not _fits(block, make, x):
            return False
        copied = copy.deepcopy(block)
        for weight in copied.parameters():
            weight.data = torch.randn(weight.shape, generator=generator) / math.sqrt(weight.shape[-1])
            weight.requires_grad_()
        found = []
        for forward in (type(copied).forward, partial(_forward, make=make)):
            try:
                out = forward(copied, hidden_states=x, **options)
                found.append([out, *torch.autograd.grad(out.square().sum(), [x, *copied.parameters()])])
            except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as problem:
                log.debug("%s is not computed in two functions: %s", type(block).__name__, problem)
                return False
    return all((own - other).norm() <= 1e-4 * own.norm() for own, other in zip(*found, strict=True))
