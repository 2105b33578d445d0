"""Parts of a model that may get kernels, recognised by their structure, and made-up values to try their code on."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def is_norm(part: nn.Module) -> bool:
    """Returns True if it has the parts of a root-mean-square norm: a weight and an epsilon, and only its input as argument."""
    names = [name for name, _ in (*part.named_parameters(), *part.named_buffers(), *part.named_children())]
    return names == ["weight"] and epsilon_of(part) is not None and takes_one(part) and "forward" not in vars(part)


def is_gated_mlp(part: nn.Module) -> bool:
    """Returns True if it has the parts of ``down(act(gate(x)) · up(x))``."""
    own = [name for name, _ in part.named_parameters(recurse=False)]
    return {name for name, _ in part.named_children()} == MLP and not own and "forward" not in vars(part)


def takes_one(part: nn.Module) -> bool:
    """Returns True if the only argument of its class's forward is its input."""
    return len(inspect.signature(type(part).forward).parameters) == 2


def epsilon_of(part: nn.Module) -> float | None:
    """Returns the epsilon of a norm; None: it has none."""
    return next((value for name in ("variance_epsilon", "eps") if isinstance(value := vars(part).get(name), float)), None)


def wave(*shape: int, device: torch.device | None = None) -> Tensor:
    """Returns made-up float32 values between -1 and 1, without using torch's random state, which belongs to the run."""
    count = torch.Size(shape).numel()
    return torch.arange(1, count + 1, device=device, dtype=torch.float32).mul(7.3).sin().view(shape)
