"""Log-probabilities of tokens from hidden states, a chunk of the vocabulary matrix product at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_host.records.token_sets import Sets, unpack_tokens

CHUNK_ELEMENTS = {"cpu": 2**25, "other": 2**27}
"""Number of logits held at once: 128 MB on CPUs; more on other devices, where it is costly to read the head's gradient again
for each chunk.
"""

STACKED = 4
"""Chunks in 16 bits whose part of the head's gradient is one product, because adding each to the sum in 32 bits reads and writes
as much as that gradient.
"""

OUTSIDE = -1e30
"""Logit of tokens that could not be drawn: their probability is exactly 0, and finite numbers have an entropy."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    compute_dtype: torch.dtype | None = None,
    chunk_tokens: int | None = None,
    with_entropy: bool = False,
    entropy_grad: bool = False,
    keep_logits: bool = False,
    support: Sets = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes the log-softmax of ``logits / temperature`` at the targets, in fp32, without ``[N, V]`` logits.

    The backward pass computes each chunk's logits again, unless they are kept: if asked, or if there is one chunk. Logits are
    ``scale · (hidden weightᵀ + bias)``, then ``softcap · tanh(logits / softcap)`` if the model does that (Gemma 2).

    Args:
        hidden: ``[N, H]``.
        weight: ``[V, H]``; its gradient is summed over chunks in fp32.
        bias: ``[V]`` or ``None``.
        targets: ``[N]`` int64, or ``[N, K]``: several tokens at each place.
        compute_dtype: of the matrix products; default: that of ``hidden``.
        chunk_tokens: tokens at once; default: by the vocabulary's size.
        with_entropy: also the entropy of the whole distribution at this temperature.
        entropy_grad: gradients flow through the entropy.
        keep_logits: keep all products of the forward pass for the backward pass (``kept_bytes``); the results are the same.
        support: at each place, the tokens that could be drawn (``records/token_sets.py``): the softmax is over them alone.

    Returns:
        ``logprobs`` in the shape of ``targets`` and ``entropy [N]`` (or ``None``), float32 (float64 for float64 inputs).
    """
    keep = keep_logits and torch.is_grad_enabled()
    settings = (temperature, scale, softcap, with_entropy, entropy_grad, keep, support)
    plan = _plan(hidden, weight, compute_dtype, chunk_tokens, *settings)
    columns = targets.unsqueeze(-1) if targets.dim() == 1 else targets
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, bias, columns, plan)
    return logprobs.reshape(targets.shape), entropy if with_entropy else None


@torch.no_grad()
def top_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    k: int,
    temperature: float = 1.0,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    compute_dtype: torch.dtype | None = None,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the ``k`` largest of the same log-probabilities at each place, and their tokens: ``[N, k]`` each, the largest
    first.
    """
    plan = _plan(hidden, weight, compute_dtype, chunk_tokens, temperature, scale, softcap)
    logprobs = torch.empty((len(hidden), k), dtype=plan.result, device=hidden.device)
    ids = torch.empty((len(hidden), k), dtype=torch.int64, device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        w, b = weight.to(plan.matmul), None if bias is None else bias.to(plan.matmul)
        for begin in range(0, len(hidden), plan.chunk):
            part = slice(begin, begin + plan.chunk)
            logprobs[part], ids[part] = plan.log_softmax(plan.product(hidden[part], w, b), part)[0].topk(k)
    return logprobs, ids


def chunk_bytes(*, tokens: int, vocabulary: int, hidden: int, narrow: bool, cast: bool, trained: bool, device: str) -> float:
    """Returns the bytes that are there at once for log-probabilities of ``tokens``, at their most, in the backward pass.

    Args:
        narrow: products are in 16 bits.
        cast: the head's weights are in 32 bits and cast for them.
        trained: the head is.
    """
    chunk = max(1, CHUNK_ELEMENTS["cpu" if device == "cpu" else "other"] // vocabulary)
    here = min(tokens, chunk) * vocabulary
    stack = min(tokens, STACKED * chunk) * vocabulary if narrow and trained else 0
    head = vocabulary * hidden
    # Logits, their log-softmax, and in 16 bits the products; the head's gradient in float32, and a part of it in 16 bits.
    return here * (10 if narrow else 8) + 2 * stack + 2 * head * cast + trained * head * (4 + (2 if narrow else 0))


def kept_bytes(tokens: int, vocabulary: int, *, narrow: bool, capped: bool = False) -> int:
    """Returns the bytes of kept logits, beside ``chunk_bytes``: of products in 16 bits, or of log-probabilities in 32, and there
    of the softcap's derivative.
    """
    return tokens * vocabulary * (2 if narrow else 8 if capped else 4)


def logprobs_of_logits(
    logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool, entropy_grad: bool, support: Sets = None
) -> tuple[Tensor, Tensor | None]:
    """Computes the same from ``[N, V]`` logits, for models whose head is more than a matrix product."""
    scaled = logits.float() / temperature
    every = F.log_softmax(scaled if support is None else scaled.masked_fill(_outside(support, scaled), OUTSIDE), dim=-1)
    entropy = None
    if with_entropy:
        with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
            entropy = -(every.exp() * every).sum(-1)
    columns = targets.unsqueeze(-1) if targets.dim() == 1 else targets
    return every.gather(-1, columns).reshape(targets.shape), entropy


def _outside(support: Sequence[bytes], logits: Tensor) -> Tensor:
    """Returns ``[n, V]`` bool: true at the tokens that could not be drawn."""
    sets = [unpack_tokens(one) for one in support]
    sizes = torch.tensor([len(ids) for ids in sets]).to(logits.device, non_blocking=True)
    ids = torch.from_numpy(np.concatenate(sets).astype(np.int32)).to(logits.device, non_blocking=True)
    outside = (sizes > 0)[:, None].repeat(1, logits.shape[-1])
    outside[torch.repeat_interleave(sizes, output_size=len(ids)), ids.long()] = False
    return outside


@dataclass(frozen=True, slots=True)
class _Plan:
    matmul: torch.dtype
    result: torch.dtype
    chunk: int
    temperature: float
    scale: float
    softcap: float | None
    with_entropy: bool = False
    entropy_grad: bool = False
    keep: bool = False
    support: Sets = None

    @property
    def narrow(self) -> bool:
        return self.matmul != self.result

    def product(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns ``[n, V]`` logits, in the type of products."""
        return F.linear(hidden.to(self.matmul), weight, bias)

    def log_softmax(self, product: Tensor, part: slice) -> tuple[Tensor, Tensor | None]:
        """Returns ``[n, V]`` log-probabilities of a chunk, and the softcap's derivative if there is one. May write over a product
        in 32 bits.
        """
        logits, slope = product.to(self.result), None
        if self.softcap is not None:
            slope = logits.mul_(self.scale / self.softcap).tanh_()
            logits = slope * (self.softcap / self.temperature)
        elif self.scale != self.temperature:
            logits.mul_(self.scale / self.temperature)
        if self.support is not None:
            logits.masked_fill_(_outside(self.support[part], logits), OUTSIDE)
        return F.log_softmax(logits, dim=-1), None if slope is None else slope.square_().neg_().add_(1.0)


def _plan(hidden: Tensor, weight: Tensor, compute_dtype: torch.dtype | None, chunk: int | None, *settings: Any) -> _Plan:
    matmul = compute_dtype or hidden.dtype
    chunk = chunk or max(1, CHUNK_ELEMENTS["cpu" if hidden.device.type == "cpu" else "other"] // weight.shape[0])
    return _Plan(matmul, torch.promote_types(matmul, torch.float32), chunk, *settings)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, plan: _Plan
    ) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        logprobs = torch.zeros(targets.shape, dtype=plan.result, device=hidden.device)
        entropy = torch.zeros(count, dtype=plan.result, device=hidden.device)
        kept: list[Tensor | None] = []
        with torch.autocast(hidden.device.type, enabled=False):
            w, b = weight.to(plan.matmul), None if bias is None else bias.to(plan.matmul)
            for begin in range(0, count, plan.chunk):
                part = slice(begin, begin + plan.chunk)
                product = plan.product(hidden[part], w, b)
                every, slope = plan.log_softmax(product, part)
                logprobs[part] = every.gather(1, targets[part])
                if plan.with_entropy:
                    entropy[part] = every.exp().mul_(every).sum(-1).neg_()
                if plan.keep or count <= plan.chunk:
                    kept += (product, None) if plan.narrow else (every, slope)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, *kept)
        ctx.plan = plan
        if not plan.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy, *kept = ctx.saved_tensors
        plan: _Plan = ctx.plan
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=plan.result) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=plan.result) if needs_bias else None
        count = len(hidden)
        stack = min(count, STACKED * plan.chunk)
        stacked: Tensor | None = None
        if needs_weight and plan.narrow:
            stacked = hidden.new_empty((stack, len(weight)), dtype=plan.matmul)
        with torch.autocast(hidden.device.type, enabled=False):
            w, b = weight.to(plan.matmul), None if bias is None else bias.to(plan.matmul)
            for begin in range(0, count, plan.chunk):
                end = min(begin + plan.chunk, count)
                part = slice(begin, end)
                every, slope = kept[2 * (begin // plan.chunk) :][:2] or (None, None)
                if plan.narrow or every is None:
                    every, slope = plan.log_softmax(plan.product(hidden[part], w, b) if every is None else every, part)
                g = grad_logprobs[part]
                total = g.sum(1, keepdim=True)
                # d logp(y)/dz = 1[y] − p, and dH/dz = −p (log p + H), for z = logits / temperature.
                grad = every.exp() if plan.entropy_grad or (kept and not plan.narrow) else every.exp_()
                if plan.entropy_grad:
                    grad.mul_((every + entropy[part, None]).mul_(grad_entropy[part, None]).add_(total)).neg_()
                else:
                    grad.mul_(-total)
                grad.scatter_add_(1, targets[part], g)
                if plan.scale != plan.temperature:
                    grad.mul_(plan.scale / plan.temperature)
                if slope is not None:
                    grad.mul_(slope)
                first = begin - begin % stack
                low = grad.to(plan.matmul) if stacked is None else stacked[begin - first : end - first].copy_(grad)
                if grad_hidden is not None:
                    grad_hidden[part] = low @ w
                if grad_weight is not None and stacked is None:
                    grad_weight.addmm_(low.t(), hidden[part].to(low.dtype))
                elif grad_weight is not None and stacked is not None and end in (first + stack, count):  # in the wider dtype
                    grad_weight += stacked[: end - first].t() @ hidden[first:end].to(low.dtype)
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None if grad_bias is None else grad_bias.to(bias.dtype), None, None
