"""Log-probabilities of tokens from hidden states: for each chunk one product and one pass over its logits, and in the backward
pass one more, which writes their gradient in place of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_host.comparison import token_logprobs as plain_token_logprobs
from rlhf_kernels_triton import ops

CHUNK_BYTES = {"cpu": 2**27, "other": 2**30}
"""Size of the logits held at once. The head's gradient in float32 is read and written once for each chunk."""


@dataclass(frozen=True, slots=True)
class _Plan:
    matmul: torch.dtype
    chunk: int
    scale: float
    softcap: float | None
    temperature: float
    with_entropy: bool
    entropy_grad: bool
    keep: bool


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
) -> tuple[Tensor, Tensor | None]:
    """Computes the same as the host's own ``token_logprobs``, which takes what is not for these kernels: float64, and no tokens."""
    matmul = compute_dtype or hidden.dtype
    if matmul == torch.float64 or not targets.numel():
        settings: dict[str, Any] = {"scale": scale, "softcap": softcap, "compute_dtype": compute_dtype}
        settings |= {"chunk_tokens": chunk_tokens, "with_entropy": with_entropy, "entropy_grad": entropy_grad}
        settings["keep_logits"] = keep_logits
        return plain_token_logprobs(hidden, weight, bias, targets, temperature, **settings)
    held = CHUNK_BYTES["cpu" if hidden.device.type == "cpu" else "other"]
    chunk = chunk_tokens or max(1, held // (len(weight) * matmul.itemsize))
    keep = (keep_logits or len(hidden) <= chunk) and torch.is_grad_enabled()
    plan = _Plan(matmul, chunk, scale, softcap, temperature, with_entropy, entropy_grad, keep)
    columns = targets.unsqueeze(-1) if targets.dim() == 1 else targets
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, bias, columns, plan)
    return logprobs.reshape(targets.shape), entropy if with_entropy else None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, plan: _Plan
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(hidden.device.type, enabled=False):
            products = _Products(hidden, weight, bias, plan)
            options = (plan.scale, plan.softcap, plan.temperature, plan.with_entropy)
            results = [ops.token_logprobs(products.of(part), targets[part], *options) for part in products.parts]
        logprobs, entropy, lses = (torch.cat(one) if len(one) > 1 else one[0] for one in zip(*results, strict=True))
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, lses)
        ctx.plan = plan
        ctx.kept = products.z if plan.keep and any(ctx.needs_input_grad) else None
        if not plan.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprobs: Tensor, of_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy, lses = ctx.saved_tensors
        plan: _Plan = ctx.plan
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        # Gradients are written over kept logits, so a second backward pass has none.
        kept, ctx.kept = ctx.kept, None
        with torch.autocast(hidden.device.type, enabled=False):
            products = _Products(hidden, weight, bias, plan, kept)
            for part in products.parts:
                z = products.of(part) if kept is None else kept[part]
                of_entropies = of_entropy[part] if plan.entropy_grad else None
                saved = (targets[part], lses[part], entropy[part], of_logprobs[part], of_entropies)
                ops.token_logprobs_backward(z, *saved, plan.scale, plan.softcap, plan.temperature)
                if grad_hidden is not None:
                    grad_hidden[part] = z @ products.weight
                if grad_weight is not None:
                    _add_product(grad_weight, z, hidden[part].to(plan.matmul))
                if grad_bias is not None:
                    grad_bias += z.sum(0, dtype=torch.float32)
        into_weight, into_bias = (
            None if one is None else one.to(like.dtype) for one, like in ((grad_weight, weight), (grad_bias, bias))
        )
        return grad_hidden, into_weight, into_bias, None, None


class _Products:
    """The products of a head with all states, a chunk at a time, in the same memory if they are not kept."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan, memory: Tensor | None = None):
        self.hidden, self.weight = hidden, weight.to(plan.matmul)
        self.bias = None if bias is None else bias.to(plan.matmul)
        self.parts = [slice(begin, min(begin + plan.chunk, len(hidden))) for begin in range(0, len(hidden), plan.chunk)]
        rows = len(hidden) if plan.keep else min(len(hidden), plan.chunk)
        self.z = self.weight.new_empty((rows, len(weight))) if memory is None else memory
        self.keep = plan.keep

    def of(self, part: slice) -> Tensor:
        """Returns the products of these states, in place of the last ones or beside them."""
        z, states = self.z[part if self.keep else slice(part.stop - part.start)], self.hidden[part].to(self.weight.dtype)
        if self.bias is None:
            return torch.mm(states, self.weight.t(), out=z)
        return torch.addmm(self.bias, states, self.weight.t(), out=z)


def _add_product(total: Tensor, z: Tensor, states: Tensor) -> None:
    """Adds ``zᵀ states`` to a float32 sum; on GPUs the product itself adds in float32."""
    if z.dtype == torch.float32:
        total.addmm_(z.t(), states)
    elif z.is_cuda and _adds_in_32_bits(z.device, z.dtype):
        torch.addmm(total, z.t(), states, out_dtype=torch.float32, out=total)
    else:
        total += z.t() @ states


@cache
def _adds_in_32_bits(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns True if this torch has products that add to a float32 sum in place."""
    total, one = torch.zeros(16, 16, device=device), torch.ones(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(total, one, one, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return float(total.sum()) == 16**3
