"""Operations ``rlhf::…`` around the Triton kernels, with gradients. Fake tensors and ``torch.compile`` see one operation each.

Importing this needs no Triton.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor
from torch.library import custom_op

# Schemas are read from these signatures, in which torch knows Optional.


@custom_op("rlhf::rms_norm", mutates_args=())
def rms_norm(
    x: Tensor,
    branch: Optional[Tensor],  # noqa: UP045
    weight: Tensor,
    eps: float,
    offset: float,
    early: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ``(x + branch) / rms · (weight + offset)`` in ``dtype``, the sum (empty without ``branch``), and the factor of each
    row. ``early``: what the weight multiplies is rounded to the type of ``x``.
    """
    from rlhf_kernels_triton import kernels

    outputs = _norms(x, branch, dtype)
    kernels.norm(x, branch, weight, eps, offset, early, outputs)
    return outputs


@rms_norm.register_fake
def _(x: Tensor, branch: Any, weight: Tensor, eps: float, offset: float, early: bool, dtype: torch.dtype) -> Any:
    return _norms(x, branch, dtype)


def _norms(x: Tensor, branch: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    total = x.new_empty(0) if branch is None else x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, branch.dtype))
    rows = x.numel() // x.shape[-1]
    return x.new_empty(x.shape, dtype=dtype), total, x.new_empty(rows, dtype=torch.float32)


@custom_op("rlhf::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    of_y: Tensor,
    of_total: Optional[Tensor],  # noqa: UP045
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    offset: float,
    early: bool,
    branch: Optional[torch.dtype],  # noqa: UP045
    of_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of ``x``, of a branch in another type (else empty), and of the weight (if asked for, else empty)."""
    from rlhf_kernels_triton import kernels

    outputs = _gradients(x, weight, branch, of_weight)
    kernels.norm_backward(of_y, of_total, x, weight, rstd, offset, early, outputs)
    return outputs


@rms_norm_backward.register_fake
def _(of_y: Any, of_total: Any, x: Any, weight: Any, rstd: Any, offset: Any, early: Any, branch: Any, of_weight: Any) -> Any:
    return _gradients(x, weight, branch, of_weight)


def _gradients(x: Tensor, weight: Tensor, branch: torch.dtype | None, of_weight: bool) -> tuple[Tensor, Tensor, Tensor]:
    of_branch = x.new_empty(0) if branch is None else x.new_empty(x.shape, dtype=branch)
    shape = weight.shape if of_weight else (0,)
    return x.new_empty(x.shape), of_branch, weight.new_empty(shape, dtype=torch.float32)


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, branch, weight, _, ctx.offset, ctx.early, _ = inputs
    _, total, rstd = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(rstd)
    ctx.branch = None if branch is None else branch.dtype
    ctx.types = x.dtype, weight.dtype
    ctx.save_for_backward(x if branch is None else total, weight, rstd)


def _norm_gradients(ctx: Any, of_y: Tensor | None, of_total: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    kept, weight, rstd = ctx.saved_tensors
    x_type, weight_type = ctx.types
    if of_y is None:
        of_y = torch.zeros_like(kept)
    other = None if ctx.branch == kept.dtype else ctx.branch
    of_total = None if ctx.branch is None else of_total
    of_x, of_branch, of_weight = rms_norm_backward(
        of_y, of_total, kept, weight, rstd, ctx.offset, ctx.early, other, ctx.needs_input_grad[2]
    )
    into_branch = None if ctx.branch is None else of_x if other is None else of_branch
    into_weight = of_weight.to(weight_type) if ctx.needs_input_grad[2] else None
    return of_x.to(x_type), into_branch, into_weight, None, None, None, None


rms_norm.register_autograd(_norm_gradients, setup_context=_save_norm)


@custom_op("rlhf::rotary", mutates_args=())
def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns queries and keys ``[B, heads, L, D]`` in ``dtype``, turned by ``cos`` and ``sin`` ``[B or 1, L, D]``, as
    ``x · cos + rotate_half(x) · sin``; ``back``: gradients of what was turned.
    """
    from rlhf_kernels_triton import kernels

    outputs = _turned(q, dtype), _turned(k, dtype)
    kernels.rotary(q, k, cos, sin, back, outputs)
    return outputs


@rotary.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool, dtype: torch.dtype) -> Any:
    return _turned(q, dtype), _turned(k, dtype)


def _turned(x: Tensor, dtype: torch.dtype) -> Tensor:
    batch, heads, length, width = x.shape
    return x.new_empty((batch, length, heads, width), dtype=dtype).transpose(1, 2)  # as linear layers leave them


def _save_turns(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, cos, sin, ctx.back, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.like, ctx.types = (q.shape, k.shape), (q.dtype, k.dtype)
    ctx.save_for_backward(cos, sin)


def _turn_gradients(ctx: Any, of_q: Tensor | None, of_k: Tensor | None) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    present = of_q if of_q is not None else of_k
    if present is None:
        return (None,) * 6
    of_q, of_k = (present.new_zeros(shape) if one is None else one for one, shape in zip((of_q, of_k), ctx.like, strict=True))
    turned = rotary(of_q, of_k, cos, sin, not ctx.back, ctx.types[0])
    return turned[0], turned[1].to(ctx.types[1]), None, None, None, None


rotary.register_autograd(_turn_gradients, setup_context=_save_turns)


@custom_op("rlhf::swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns ``silu(gate) · up``."""
    from rlhf_kernels_triton import kernels

    y = _joined(gate, up)
    kernels.swiglu(gate, up, y)
    return y


@swiglu.register_fake
def _joined(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


@custom_op("rlhf::swiglu_backward", mutates_args=())
def swiglu_backward(of_y: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of ``gate`` and ``up``."""
    from rlhf_kernels_triton import kernels

    outputs = gate.new_empty(gate.shape), up.new_empty(up.shape)
    kernels.swiglu_backward(of_y, gate, up, outputs)
    return outputs


@swiglu_backward.register_fake
def _(of_y: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


swiglu.register_autograd(
    lambda ctx, of_y: swiglu_backward(of_y, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


# Gradients of these two are in ``head.py``, which calls them for each chunk of logits.


@custom_op("rlhf::token_logprobs", mutates_args=())
def token_logprobs(
    z: Tensor,
    targets: Tensor,
    scale: float,
    softcap: Optional[float],  # noqa: UP045
    temperature: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probabilities ``[N, K]`` of ``targets``, and entropies (if asked for, else undefined) and log-sums ``[N]`` of
    the distributions whose products are ``z`` ``[N, V]``.
    """
    from rlhf_kernels_triton import kernels

    outputs = _of_tokens(z, targets)
    kernels.logprobs(z, targets, scale, softcap, temperature, with_entropy, outputs)
    return outputs


@token_logprobs.register_fake
def _(z: Tensor, targets: Tensor, scale: float, softcap: Any, temperature: float, with_entropy: bool) -> Any:
    return _of_tokens(z, targets)


def _of_tokens(z: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(z.new_empty(shape, dtype=torch.float32) for shape in (targets.shape, len(z), len(z)))  # type: ignore[return-value]


@custom_op("rlhf::token_logprobs_backward", mutates_args=("z",))
def token_logprobs_backward(
    z: Tensor,
    targets: Tensor,
    lses: Tensor,
    entropy: Tensor,
    of_logprobs: Tensor,
    of_entropy: Optional[Tensor],  # noqa: UP045
    scale: float,
    softcap: Optional[float],  # noqa: UP045
    temperature: float,
) -> None:
    """Writes the gradient of the products over them."""
    from rlhf_kernels_triton import kernels

    kernels.logprobs_backward(z, targets, (lses, entropy), (of_logprobs, of_entropy), scale, softcap, temperature)


@token_logprobs_backward.register_fake
def _(*arguments: Any) -> None:
    return None
