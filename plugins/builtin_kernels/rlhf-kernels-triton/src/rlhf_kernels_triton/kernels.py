"""The Triton kernels and their launches: norms, rotary embedding, SwiGLU, and log-probabilities of logits. Importing this needs
Triton.

Everything is computed in float32, and rounded once where it is written.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048
"""Elements of the tile of rows that one program of a norm holds, where a row is shorter."""
CHUNK = 1024
"""Elements of a program of SwiGLU."""
VOCABULARY = 4096
"""Logits of a row that a program holds at once."""


def _on_its_device(launch: Callable[..., None]) -> Callable[..., None]:
    """Triton launches on the current device, which need not be that of the tensors."""

    @wraps(launch)
    def launched(first: Tensor, *arguments: Any) -> None:
        with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
            launch(first, *arguments)

    return launched


# --- norms --------------------------------------------------------------------------------------


@triton.jit
def _norm(
    x, branch, weight, y, total, rstd, rows, width, eps, offset,
    BRANCH: tl.constexpr, EARLY: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (col < width)[None, :]
    at = row[:, None] * width + col[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    kept = x.dtype.element_ty
    if BRANCH:
        kept = total.dtype.element_ty
        value += tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(kept)
        tl.store(total + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 1) / width + eps)
    tl.store(rstd + row, factor, mask=row < rows)
    value *= factor[:, None]
    if EARLY:
        value = value.to(kept).to(tl.float32)
    w = tl.load(weight + col, mask=col < width, other=0.0).to(tl.float32) + offset
    tl.store(y + at, (value * w[None, :]).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward(
    of_y, of_total, x, weight, rstd, of_x, of_branch, of_weight, rows, width, offset, per_program,
    TOTAL: tl.constexpr, BRANCH: tl.constexpr, WEIGHT: tl.constexpr, EARLY: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    w = tl.load(weight + col, mask=col < width, other=0.0).to(tl.float32) + offset
    summed = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, per_program, ROWS):
        row = program * per_program + start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (col < width)[None, :]
        at = row[:, None] * width + col[None, :]
        g = tl.load(of_y + at, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * factor
        if WEIGHT:
            if EARLY:
                summed += tl.sum(g * value.to(x.dtype.element_ty).to(tl.float32), 0)
            else:
                summed += tl.sum(g * value, 0)
        g *= w[None, :]
        g = factor * (g - value * (tl.sum(g * value, 1) / width)[:, None])
        if TOTAL:
            g += tl.load(of_total + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(of_x + at, g.to(of_x.dtype.element_ty), mask=inside)
        if BRANCH:
            tl.store(of_branch + at, g.to(of_branch.dtype.element_ty), mask=inside)
    if WEIGHT:
        tl.store(of_weight + program * width + col, summed, mask=col < width)


@_on_its_device
def norm(x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, offset: float, early: bool, outputs: Any) -> None:
    """Writes ``(x + branch) / rms · (weight + offset)``, the sum and the factors into ``outputs``."""
    y, total, rstd = outputs
    x, width = x.contiguous(), x.shape[-1]
    rows = x.numel() // width
    block, tile, warps = _tile(width)
    options = {"BRANCH": branch is not None, "EARLY": early, "ROWS": tile, "BLOCK": block, "num_warps": warps}
    other = x if branch is None else branch.contiguous()
    _norm[(triton.cdiv(rows, tile),)](x, other, weight, y, total, rstd, rows, width, eps, offset, **options)


@_on_its_device
def norm_backward(
    of_y: Tensor, of_total: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, offset: float, early: bool, outputs: Any
) -> None:
    """Writes the gradients of ``norm`` into ``outputs``, each as far as it has elements."""
    of_x, of_branch, of_weight = outputs
    width = x.shape[-1]
    rows = x.numel() // width
    block, tile, warps = _tile(width)
    per_program = triton.cdiv(triton.cdiv(rows, _programs(x)), tile) * tile
    programs = triton.cdiv(rows, per_program)
    partial = of_weight.new_empty((programs, width), dtype=torch.float32) if of_weight.numel() else of_weight
    options = {
        "TOTAL": of_total is not None, "BRANCH": bool(of_branch.numel()), "WEIGHT": bool(of_weight.numel()), "EARLY": early,
        "ROWS": tile, "BLOCK": block, "num_warps": warps,
    }  # fmt: skip
    of_y, x = of_y.contiguous(), x.contiguous()
    of_sum = of_y if of_total is None else of_total.contiguous()
    arguments = (of_y, of_sum, x, weight, rstd, of_x, of_branch, partial, rows, width, offset, per_program)
    _norm_backward[(programs,)](*arguments, **options)
    if of_weight.numel():
        torch.sum(partial, 0, dtype=torch.float32, out=of_weight)


def _tile(width: int) -> tuple[int, int, int]:
    """Returns the columns and rows of a program's tile, and its warps."""
    block = triton.next_power_of_2(width)
    rows = max(1, TILE // block)
    return block, rows, min(16, max(4, block * rows // 512))


def _programs(x: Tensor) -> int:
    """Returns how many programs share the rows, each with its own part of the weight's gradient."""
    return 4 * torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2


# --- rotary embedding ---------------------------------------------------------------------------


@triton.jit
def _turn(
    x, cos, sin, out, batch, place, x_batch, x_head, x_place, out_batch, out_head, out_place, cos_at, sin_at,
    heads, HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    head, col = tl.arange(0, HEADS), tl.arange(0, BLOCK)
    inside = (head < heads)[:, None] & (col < HALF)[None, :]
    at = x + batch * x_batch + place * x_place + head[:, None] * x_head + col[None, :]
    to = out + batch * out_batch + place * out_place + head[:, None] * out_head + col[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    c1 = tl.load(cos + cos_at + col, mask=col < HALF, other=0.0).to(tl.float32)[None, :]
    c2 = tl.load(cos + cos_at + HALF + col, mask=col < HALF, other=0.0).to(tl.float32)[None, :]
    s1 = tl.load(sin + sin_at + col, mask=col < HALF, other=0.0).to(tl.float32)[None, :]
    s2 = tl.load(sin + sin_at + HALF + col, mask=col < HALF, other=0.0).to(tl.float32)[None, :]
    if BACK:
        one, other = first * c1 + second * s2, second * c2 - first * s1
    else:
        one, other = first * c1 - second * s1, second * c2 + first * s2
    tl.store(to, one.to(out.dtype.element_ty), mask=inside)
    tl.store(to + HALF, other.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotary(
    q, k, cos, sin, q_out, k_out, length,
    q_batch, q_head, q_place, k_batch, k_head, k_place, qo_batch, qo_head, qo_place, ko_batch, ko_head, ko_place,
    cos_batch, cos_place, sin_batch, sin_place, q_heads, k_heads,
    HALF: tl.constexpr, BLOCK: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    batch, place = token // length, token % length
    cos_at, sin_at = batch * cos_batch + place * cos_place, batch * sin_batch + place * sin_place
    _turn(
        q, cos, sin, q_out, batch, place, q_batch, q_head, q_place, qo_batch, qo_head, qo_place, cos_at, sin_at,
        q_heads, HALF, BLOCK, Q_HEADS, BACK,
    )  # fmt: skip
    _turn(
        k, cos, sin, k_out, batch, place, k_batch, k_head, k_place, ko_batch, ko_head, ko_place, cos_at, sin_at,
        k_heads, HALF, BLOCK, K_HEADS, BACK,
    )  # fmt: skip


@_on_its_device
def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool, outputs: tuple[Tensor, Tensor]) -> None:
    """Writes queries and keys ``[B, heads, L, D]``, turned by ``cos`` and ``sin`` ``[B or 1, L, D]``, into ``outputs``; ``back``:
    gradients through it.
    """
    q, k, cos, sin = (one if one.stride(-1) == 1 else one.contiguous() for one in (q, k, cos, sin))
    batch, heads, length, width = q.shape
    strides = [stride for one in (q, k, *outputs) for stride in one.stride()[:3]]
    turns = [stride for one in (cos, sin) for stride in (one.stride(0) if len(one) > 1 else 0, one.stride(1))]
    blocks = {"Q_HEADS": triton.next_power_of_2(heads), "K_HEADS": triton.next_power_of_2(k.shape[1])}
    half = width // 2
    options = {"HALF": half, "BLOCK": triton.next_power_of_2(half), **blocks, "BACK": back}
    _rotary[(batch * length,)](q, k, cos, sin, *outputs, length, *strides, *turns, heads, k.shape[1], **options)


# --- SwiGLU -------------------------------------------------------------------------------------


@triton.jit
def _swiglu(gate, up, y, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < count, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(y + at, (g * tl.sigmoid(g) * u).to(y.dtype.element_ty), mask=at < count)


@triton.jit
def _swiglu_backward(of_y, gate, up, of_gate, of_up, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.load(of_y + at, mask=at < count, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=at < count, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < count, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(of_gate + at, (d * u * s * (1 + g * (1 - s))).to(of_gate.dtype.element_ty), mask=at < count)
    tl.store(of_up + at, (d * g * s).to(of_up.dtype.element_ty), mask=at < count)


@_on_its_device
def swiglu(gate: Tensor, up: Tensor, y: Tensor) -> None:
    """Writes ``silu(gate) · up`` into ``y``."""
    grid = (triton.cdiv(y.numel(), CHUNK),)
    _swiglu[grid](gate.contiguous(), up.contiguous(), y, y.numel(), BLOCK=CHUNK)


@_on_its_device
def swiglu_backward(of_y: Tensor, gate: Tensor, up: Tensor, outputs: tuple[Tensor, Tensor]) -> None:
    """Writes the gradients of ``swiglu`` into ``outputs``."""
    grid = (triton.cdiv(of_y.numel(), CHUNK),)
    _swiglu_backward[grid](of_y.contiguous(), gate.contiguous(), up.contiguous(), *outputs, of_y.numel(), BLOCK=CHUNK)


# --- log-probabilities --------------------------------------------------------------------------


@triton.jit
def _tanh(x):
    e = tl.exp(-2 * tl.abs(x))
    return tl.where(x < 0, -1.0, 1.0) * (1 - e) / (1 + e)


@triton.jit
def _scaled(z, inner, outer, CAP: tl.constexpr):
    """The logits over the temperature, of products: ``inner`` before a softcap's tanh, ``outer`` after it."""
    x = z.to(tl.float32) * inner
    if CAP:
        x = _tanh(x) * outer
    return x


@triton.jit
def _logprobs(
    z, targets, logprobs, entropy, lses, inner, outer, vocabulary, columns,
    CAP: tl.constexpr, ENTROPY: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)  # of exp(x - top)
    mean = tl.zeros((BLOCK,), tl.float32)  # of exp(x - top) (x - top)
    for begin in range(0, vocabulary, BLOCK):
        there = begin + col < vocabulary
        x = _scaled(tl.load(z + row * vocabulary + begin + col, mask=there, other=0.0), inner, outer, CAP)
        likely = there & (x != float("-inf"))
        new = tl.where(likely, tl.maximum(top, x), top)
        old = tl.where(top == float("-inf"), 0.0, tl.exp(top - new))
        below = tl.where(likely, x - new, 0.0)
        e = tl.where(likely, tl.exp(below), 0.0)
        if ENTROPY:
            mean = tl.where(old > 0, old * (mean + total * tl.where(old > 0, top - new, 0.0)), 0.0) + e * below
        total = total * old + e
        top = new
    highest = tl.max(top, 0)
    weight = tl.where(top == float("-inf"), 0.0, tl.exp(top - highest))
    if ENTROPY:
        mean = tl.where(weight > 0, weight * (mean + total * tl.where(weight > 0, top - highest, 0.0)), 0.0)
    summed = tl.sum(total * weight, 0)
    log = tl.log(summed)
    tl.store(lses + row, highest + log)
    if ENTROPY:
        tl.store(entropy + row, log - tl.sum(mean, 0) / summed)
    wanted = tl.arange(0, COLUMNS)
    y = tl.load(targets + row * columns + wanted, mask=wanted < columns, other=0)
    own = _scaled(tl.load(z + row * vocabulary + y), inner, outer, CAP)
    tl.store(logprobs + row * columns + wanted, own - highest - log, mask=wanted < columns)


@triton.jit
def _logprobs_backward(
    z, targets, lses, entropy, of_logprobs, of_entropy, inner, outer, slope, vocabulary, columns,
    CAP: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = col < vocabulary
    read = tl.load(z + row * vocabulary + col, mask=there, other=0.0)
    logprob = _scaled(read, inner, outer, CAP) - tl.load(lses + row)
    p = tl.exp(logprob)
    d = tl.zeros((BLOCK,), tl.float32)
    all_of_row = 0.0
    for column in range(columns):
        g = tl.load(of_logprobs + row * columns + column)
        d += tl.where(col == tl.load(targets + row * columns + column), g, 0.0)
        all_of_row += g
    d -= all_of_row * p
    if ENTROPY:
        d -= tl.load(of_entropy + row) * tl.where(p > 0, p * (logprob + tl.load(entropy + row)), 0.0)
    if CAP:
        bent = _tanh(read.to(tl.float32) * inner)
        d *= 1 - bent * bent
    tl.store(z + row * vocabulary + col, (d * slope).to(z.dtype.element_ty), mask=there)


@_on_its_device
def logprobs(
    z: Tensor, targets: Tensor, scale: float, softcap: float | None, temperature: float, with_entropy: bool, outputs: Any
) -> None:
    """Writes log-probabilities ``[N, K]`` of ``targets``, the entropies and log-sums ``[N]`` of logits ``z`` ``[N, V]`` into
    ``outputs``.
    """
    rows, vocabulary = z.shape
    columns = targets.shape[1]
    inner, outer, _ = _factors(scale, softcap, temperature)
    options = {"CAP": softcap is not None, "ENTROPY": with_entropy, "COLUMNS": triton.next_power_of_2(columns)}
    block = min(VOCABULARY, triton.next_power_of_2(vocabulary))
    arguments = (z, targets.contiguous(), *outputs, inner, outer, vocabulary, columns)
    _logprobs[(rows,)](*arguments, **options, BLOCK=block, num_warps=8)


@_on_its_device
def logprobs_backward(
    z: Tensor,
    targets: Tensor,
    saved: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor | None],
    scale: float,
    softcap: float | None,
    temperature: float,
) -> None:
    """Writes the gradient of the products over ``z``. ``saved``: log-sums and entropies."""
    rows, vocabulary = z.shape
    of_logprobs, of_entropy = gradients
    inner, outer, slope = _factors(scale, softcap, temperature)
    block = min(VOCABULARY, triton.next_power_of_2(vocabulary))
    options = {"CAP": softcap is not None, "ENTROPY": of_entropy is not None, "BLOCK": block, "num_warps": 8}
    entropies = saved[0] if of_entropy is None else of_entropy.contiguous()
    arguments = (z, targets.contiguous(), *saved, of_logprobs.contiguous(), entropies, inner, outer, slope)
    _logprobs_backward[(rows, triton.cdiv(vocabulary, block))](*arguments, vocabulary, targets.shape[1], **options)


def _factors(scale: float, softcap: float | None, temperature: float) -> tuple[float, float, float]:
    """Returns what multiplies products, what multiplies the softcap's tanh of that, and the derivative but for the tanh's."""
    slope = scale / temperature
    return (slope, 1.0, slope) if softcap is None else (scale / softcap, softcap / temperature, slope)
