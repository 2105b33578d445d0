"""Types of weights: those that a role asks for, and those that its adapter was trained on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlhf_host.config.schema import RoleConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NARROW = (torch.bfloat16, torch.float16)


def weight_dtypes(
    role: RoleConfig, trainable: bool, in_files: torch.dtype | None, rounded: torch.dtype | None
) -> tuple[Any, Any]:
    """Returns the type in which the role's weights are read, and the type in which they are kept; both are ``auto`` for the
    type of the files.

    Args:
        in_files: type of the weights on disk; ``None``: the configuration does not say.
        rounded: the 16-bit type that the base had when the role's adapter was trained; ``None``: it was not rounded.
    """
    kept: Any
    if role.dtype != "auto":
        kept = DTYPES[role.dtype]
    elif trainable:
        kept = rounded or torch.float32
    else:
        kept = in_files or (torch.float32 if rounded else "auto")
    return rounded or kept, kept


def master_of(weight: Any) -> Any:
    """Returns the weight that one in 16 bits is rounded from (``models/masters.py``); the weight itself if it has no master."""
    return getattr(weight, "master", weight)


def written_type(weight: Tensor, own: torch.dtype | None = None) -> Any:
    """Returns the type in which a weight is written: the one it had before it was rounded. ``own``: that of others; default: the
    weight's.
    """
    return getattr(weight, "written_as", own or weight.dtype)


def retype(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts the parameters in place, except those in 4 bits. Buffers stay: tables of positions need their 32 bits."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
