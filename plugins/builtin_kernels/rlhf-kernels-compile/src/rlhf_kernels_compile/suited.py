"""Models whose blocks can be compiled, on devices that inductor can compile for."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo
from torch import nn

from rlhf_host.internals import blocks_of
from rlhf_host.protocols import Use

ATTENTION = ("sdpa", "eager")


def unsuited(model: nn.Module, use: Use, backend: str) -> str | None:
    """Returns why a model is not for this package, in a few words; None: try it."""
    return next(_reasons(model, use, backend), None)


def _reasons(model: Any, use: Use, backend: str) -> Iterator[str]:
    if use.purpose != "train":
        yield "it makes no decoder"
    if use.even_passes:
        yield "every rank would measure for itself, and ranks might choose differently"
    if torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":  # as vLLM without compilation does
        yield "torch.compile is switched off in this process (TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE)"
    if backend == "inductor" and (missing := _missing(use.device.type)) is not None:
        yield missing
    if not (blocks := blocks_of(model)):
        yield "it has no list of blocks"
    if (attention := model.config.get_text_config()._attn_implementation) not in ATTENTION:
        yield f"attention is {attention}, not {' or '.join(ATTENTION)}"
    if any(not weight.is_floating_point() for weight in model.parameters()):
        yield "its weights are quantized"
    for name, block in blocks.items():
        for part in block.modules():
            # Compiled code looks for neither again after the first pass.
            if part is not block and (part._forward_hooks or part._forward_pre_hooks or part._backward_hooks):
                yield f"a part of {name} has hooks"
            if "forward" in vars(part):
                yield f"a part of {name} has another forward than its class"


def _missing(device: str) -> str | None:
    """Returns what inductor lacks to compile for a device."""
    if device == "cpu":
        compiler = os.environ.get("CXX", "g++")
        return None if shutil.which(compiler) else f"there is no C++ compiler ({compiler})"
    return None if importlib.util.find_spec("triton") else "Triton is not installed"
