"""Root-mean-square norms in few passes over memory, forward and backward, in place of those that transformers writes out."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class RmsNorm(torch.autograd.Function):
    """``weight · x / sqrt(mean(x²) + epsilon)`` (arXiv:1910.07467) of ``x`` ``[..., D]`` and ``weight`` ``[D]``, float32.

    On a CPU the gradient takes less than half the time that autograd takes for the separate operators.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        normed, scale = normalize(x, epsilon)
        ctx.save_for_backward(normed, weight, scale)
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        normed, weight, scale = ctx.saved_tensors
        products = (gradient * normed).flatten(0, -2)
        of_x = of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = products.sum(0)
        if ctx.needs_input_grad[0]:
            along = torch.mv(products, weight).view_as(scale).mul_(-1 / normed.shape[-1])
            of_x = (gradient * weight).addcmul_(normed, along).mul_(scale)
        return of_x, of_weight, None


def normalize(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """``x / sqrt(mean(x²) + epsilon)`` over the last dimension, and what ``x`` was multiplied with."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = norm.square_().mul_(1 / x.shape[-1]).add_(epsilon).rsqrt_()
    return x * scale, scale


def fuse_norms(model: nn.Module) -> None:
    """Give the model's norms this forward pass, wherever it is what they compute; only on CPUs, and only in float32."""
    for module in model.modules():
        weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
        if not isinstance(epsilon, float) or not isinstance(weight, Tensor) or "forward" in vars(module):
            continue
        if weight.dim() != 1 or not len(weight) or weight.dtype != torch.float32 or weight.device.type != "cpu":
            continue
        x = torch.linspace(-3, 5, 2 * len(weight)).view(2, -1)
        with torch.no_grad():
            if torch.allclose(module(x), RmsNorm.apply(x, weight, epsilon), rtol=1e-5, atol=1e-6):
                # A copy of the module gets a copy of this, and so its own weight.
                module.forward = partial(_forward, module)  # type: ignore[method-assign]


def is_fused_norm(module: nn.Module) -> bool:
    way = vars(module).get("forward")
    return isinstance(way, partial) and way.func is _forward


def _forward(self: Any, x: Tensor) -> Tensor:
    if x.dtype != torch.float32 or self.weight.dtype != torch.float32:
        return type(self).forward(self, x)
    if torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad):
        return RmsNorm.apply(x, self.weight, self.variance_epsilon)
    # To the last bit what training computes: a ratio of log-probabilities computed both ways is 1.
    return normalize(x, self.variance_epsilon)[0].mul_(self.weight)
