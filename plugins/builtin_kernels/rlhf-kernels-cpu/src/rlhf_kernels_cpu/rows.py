"""Attention over the rows of a shared-prefix line on CPUs, forward and backward, with every prompt's queries computed once.

transformers' sdpa attention sees a prompt's queries once per row, and torch's flash kernels for CPUs are slow on short rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_host.protocols import SharedRows

LONGEST = 4
"""Length of the longest row, in head widths, above which sdpa's forward pass is as fast, and the kept probabilities take more
memory.
"""

VECTOR = 16
"""Number of which the keys of a block are a multiple: torch's softmax is slow on the rest beyond whole vectors."""


@dataclass(frozen=True, slots=True)
class Block:
    """``count`` sequences of ``queries`` queries over ``keys`` keys each, for each of ``h`` key heads."""

    count: int
    queries: int
    keys: int
    mask: Tensor
    """``[count or 1, 1, queries, 1, keys]``: 0 where a query sees a key, else minus infinity."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A line's attention as dense blocks: prompts over themselves, then completions over whole rows.

    A place of a block is one of ``[count, h, queries]`` or ``[count, h, keys]``; those of the second block follow those of the
    first. Its content is identified by ``token · h + head``. Padding repeats a token of its own sequence.
    """

    heads: int
    each: tuple[Block, ...]
    queries: Tensor
    """Content of every query place."""
    keys: Tensor
    """Content of every key place."""
    back: Tensor
    """``[N · h]``: the query place of each token and head."""
    padding: Tensor
    """Query places that are padding."""
    own: Tensor
    """Key place of each token and head of a completion, in its order in the line."""
    shared: Tensor
    """Key places with tokens of a prompt, each any number of times."""


class LatestBlocks:
    """Blocks of the line that was computed last, for all layers of a model."""

    def __init__(self) -> None:
        self._rows: SharedRows | None = None
        self._by_heads: dict[int, Blocks] = {}

    def of(self, rows: SharedRows, heads: int) -> Blocks:
        """Returns the blocks for attention with ``heads`` key heads."""
        if rows is not self._rows:
            self._rows, self._by_heads = rows, {}
        if heads not in self._by_heads:
            self._by_heads[heads] = make_blocks(rows.prompts, rows.lengths, rows.owners, heads)
        return self._by_heads[heads]


def make_blocks(
    prompts: Sequence[int], lengths: Sequence[int], owners: Sequence[int], heads: int, dtype: torch.dtype = torch.float32
) -> Blocks:
    """Returns the blocks of a line that holds all prompts and then all completions.

    Args:
        prompts: the length of every distinct prompt, at least 1.
        lengths: per row, the length of its completion.
        owners: per row, the index of its prompt.
        heads: number of key heads.
        dtype: type of the masks.
    """
    prompt_sizes, sizes, owner = torch.tensor(prompts), torch.tensor(lengths), torch.tensor(owners)
    prompt_starts = prompt_sizes.cumsum(0) - prompt_sizes
    starts = int(prompt_sizes.sum()) + sizes.cumsum(0) - sizes
    before = prompt_sizes[owner]
    ends = before + sizes

    column = torch.arange(_whole_vectors(max(prompts)))
    prompt_tokens = prompt_starts[:, None] + torch.minimum(column, prompt_sizes[:, None] - 1)
    each = [Block(len(prompts), max(prompts), len(column), _mask(column[None, : max(prompts)], len(column), dtype))]
    queries, keys = [prompt_tokens[:, : max(prompts)]], [prompt_tokens]
    real = [column[: max(prompts)] < prompt_sizes[:, None]]
    of_prompt, of_completion = [column < prompt_sizes[:, None]], [torch.zeros_like(prompt_tokens, dtype=torch.bool)]
    if max(lengths):
        column = torch.arange(_whole_vectors(int(ends.max())))
        of_prompt.append(column < before[:, None])
        of_completion.append((column >= before[:, None]) & (column < ends[:, None]))
        column = torch.minimum(column, ends[:, None] - 1)
        keys.append(column + torch.where(column < before[:, None], prompt_starts[owner][:, None], (starts - before)[:, None]))
        step = torch.arange(max(lengths))
        # In a row without completion tokens, its prompt's last token stands for them.
        queries.append(keys[1].gather(1, torch.minimum(before[:, None] + step, ends[:, None] - 1)))
        real.append(step < sizes[:, None])
        sees = (before if min(prompts) < max(prompts) else before[:1])[:, None] + step
        each.append(Block(len(lengths), len(step), column.shape[1], _mask(sees, column.shape[1], dtype)))

    head = torch.arange(heads)[:, None]
    queries_of_heads, keys_of_heads = (
        torch.cat([(tokens[:, None] * heads + head).flatten() for tokens in parts]) for parts in (queries, keys)
    )
    is_real, is_shared, is_own = (
        torch.cat([part[:, None].expand(-1, heads, -1).flatten() for part in parts])
        for parts in (real, of_prompt, of_completion)
    )
    places = is_real.nonzero().squeeze(1)
    back = torch.empty_like(places)
    back[queries_of_heads[places]] = places
    places = is_own.nonzero().squeeze(1)
    own = torch.empty_like(places)
    own[keys_of_heads[places] - int(prompt_sizes.sum()) * heads] = places
    padding, shared = (~is_real).nonzero().squeeze(1), is_shared.nonzero().squeeze(1)
    return Blocks(heads, tuple(each), queries_of_heads, keys_of_heads, back, padding, own, shared)


def _whole_vectors(size: int) -> int:
    return -(-size // VECTOR) * VECTOR


def _mask(last: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
    """Returns the mask. ``last``: ``[count or 1, queries]``, the last key that each query sees."""
    hidden = torch.arange(keys) > last[:, None, :, None, None]
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -math.inf)


class RowAttention(torch.autograd.Function):
    """``softmax(scale · q kᵀ) v`` of ``query`` ``[N, heads, D]``, ``key`` and ``value`` ``[N, h, D]``; gives ``[N, heads, D]``."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, scale: float) -> Tensor:
        q, k, v = to_places(blocks, query, key, value)
        out, probabilities = attend(q, k, v, blocks, scale)
        ctx.save_for_backward(q, k, v, *probabilities)
        ctx.blocks, ctx.scale = blocks, scale
        return out.view(query.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *probabilities = ctx.saved_tensors
        return *attend_backward(gradient, q, k, v, probabilities, ctx.blocks, ctx.scale), None, None


def to_places(blocks: Blocks, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries ``[N, heads, D]`` and keys and values ``[N, h, D]`` of a line, at the places of the blocks."""
    q, k, v = (line.reshape(len(line) * blocks.heads, -1) for line in (query, key, value))
    return q.index_select(0, blocks.queries), k.index_select(0, blocks.keys), v.index_select(0, blocks.keys)


def attend(q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, scale: float) -> tuple[Tensor, list[Tensor]]:
    """Computes, from the contents of the places, the result of every token of the line, ``[N · h, heads / h · D]``, and the
    probabilities.

    The probabilities are kept for the gradient: at these lengths that is cheaper than computing them again.
    """
    out = torch.empty_like(q)
    probabilities = []
    for block, (q_here, out_here), (k_here, v_here) in _split(blocks, k.shape[1], [q, out], [k, v]):
        scores = q.new_empty(len(q_here), q_here.shape[1], block.keys)
        scores.view(block.count, blocks.heads, block.queries, -1, block.keys).copy_(block.mask)
        scores.baddbmm_(q_here, k_here.transpose(1, 2), alpha=scale)
        p = torch.softmax(scores, -1)
        torch.bmm(p, v_here, out=out_here)
        probabilities.append(p)
    return out.index_select(0, blocks.back), probabilities


def attend_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, probabilities: Sequence[Tensor], blocks: Blocks, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of the line's queries ``[N, heads, D]``, keys and values ``[N, h, D]`` from that of ``attend``'s
    result.
    """
    width = k.shape[1]
    g = gradient.reshape(-1, q.shape[1]).index_select(0, blocks.queries)
    if len(blocks.padding):
        g.index_fill_(0, blocks.padding, 0)
    of_q, of_k, of_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    parts = _split(blocks, width, [q, g, of_q], [k, v, of_k, of_v])
    for p, (_, (q_here, g_here, of_q_here), (k_here, v_here, of_k_here, of_v_here)) in zip(probabilities, parts, strict=True):
        torch.bmm(p.transpose(1, 2), g_here, out=of_v_here)
        of_scores = torch.bmm(g_here, v_here.transpose(1, 2))
        of_scores = torch._softmax_backward_data(of_scores, p, -1, p.dtype)
        of_q_here.baddbmm_(of_scores, k_here, beta=0, alpha=scale)
        of_k_here.baddbmm_(of_scores.transpose(1, 2), q_here, beta=0, alpha=scale)
    of_query = of_q.index_select(0, blocks.back)
    tokens = len(blocks.back) // blocks.heads
    return (
        of_query.view(tokens, -1, width),
        _sum_keys(of_k, blocks).view(tokens, -1, width),
        _sum_keys(of_v, blocks).view(tokens, -1, width),
    )


def _sum_keys(places: Tensor, blocks: Blocks) -> Tensor:
    """Converts ``[key places, D]`` to ``[N · h, D]``: the sum over all places of a token; only prompts' tokens have many."""
    prompts = len(blocks.back) - len(blocks.own)
    line = places.new_zeros(len(blocks.back), places.shape[1])
    line[:prompts].index_add_(0, blocks.keys.index_select(0, blocks.shared), places.index_select(0, blocks.shared))
    torch.index_select(places, 0, blocks.own, out=line[prompts:])
    return line


def _split(
    blocks: Blocks, width: int, of_queries: list[Tensor], of_keys: list[Tensor]
) -> Iterator[tuple[Block, list[Tensor], list[Tensor]]]:
    """Yields, per block, its parts of these: ``[count · h, queries · groups, D]`` and ``[count · h, keys, D]``."""
    query = key = 0
    for block in blocks.each:
        batch = block.count * blocks.heads
        queries, keys = batch * block.queries, batch * block.keys
        yield (
            block,
            [places.narrow(0, query, queries).view(batch, -1, width) for places in of_queries],
            [places.narrow(0, key, keys).view(batch, -1, width) for places in of_keys],
        )
        query, key = query + queries, key + keys
