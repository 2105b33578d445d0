"""Parts of a model for which Liger has kernels, told by their results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from rlhf_kernels.parts import epsilon_of, is_gated_mlp, is_norm, wave
from torch import Tensor, nn

NORMS = ((0.0, "llama"), (1.0, "gemma"), (0.0, "gemma"))
"""Number added to a norm's weight, and where it rounds: before the weight as in Llama, or at the end as in Gemma."""


def patch_layers(twin: nn.Module) -> nn.Module:
    """Gives Liger's kernels to the parts of a twin that compute exactly that. The twin's modules belong to nothing else.
    Returns the twin.
    """
    for part in twin.modules():
        forward = _norm_forward(part) if is_norm(part) else _mlp_forward(part) if is_gated_mlp(part) else None
        if forward is not None:
            part.forward = MethodType(forward, part)
    return twin


@torch.no_grad()
def _norm_forward(norm: Any) -> Callable[[Any, Tensor], Tensor] | None:
    """Returns Liger's norm with the settings under which it rounds as this one does, tried in half precision; None: there are
    none.
    """
    from liger_kernel.transformers.functional import liger_rms_norm

    epsilon, width = epsilon_of(norm), len(norm.weight)
    tried = copy.deepcopy(norm).half()
    tried.weight.copy_(wave(width, device=norm.weight.device))
    x = wave(16, width, device=norm.weight.device).flip(0).mul(3).half()
    own = tried(x)

    def differ(offset: float, casting: str) -> float:
        return float((liger_rms_norm(x, tried.weight, epsilon, offset, casting, False) != own).float().mean())

    offset, casting = min(NORMS, key=lambda settings: differ(*settings))
    if differ(offset, casting) > 0.05:
        return None
    # Not in place: the gradient that would be written over may be that of a residual too.
    return lambda self, x: liger_rms_norm(x, self.weight, epsilon, offset, casting, False)


@torch.no_grad()
def _mlp_forward(mlp: Any) -> Callable[[Any, Tensor], Tensor] | None:
    from liger_kernel.transformers.functional import liger_geglu, liger_swiglu

    weight, values = mlp.gate_proj.weight, torch.linspace(-6, 6, 97)
    x = wave(2, mlp.gate_proj.in_features, device=weight.device).to(weight.dtype)
    own, written_out = mlp(x), mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
    if not torch.allclose(own, written_out):
        return None
    opened = mlp.act_fn(values.to(weight.device)).cpu()
    for plain, fused in ((F.silu(values), liger_swiglu), (F.gelu(values, approximate="tanh"), liger_geglu)):
        if torch.allclose(opened, plain, rtol=1e-5, atol=1e-6):
            return lambda self, x, fused=fused: self.down_proj(fused(self.gate_proj(x), self.up_proj(x)))
    return None
