"""Modes of a pass: evaluation, everything in 32 bits, and no TF32."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_host.models.dtypes import NARROW


@contextlib.contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Switches to evaluation mode, except layers that recompute in the backward pass, because these look at their training
    flag.
    """
    if model.training:
        model.eval()
    modules = model.modules() if torch.is_grad_enabled() else ()
    recomputing = [one for one in modules if isinstance(one, GradientCheckpointingLayer) and one.gradient_checkpointing]
    for layer in recomputing:
        layer.training = True
    try:
        yield
    finally:
        for layer in recomputing:
            layer.training = False


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Switches off TF32, which rounds float32 to 10 bits of mantissa on CUDA: by default in convolutions, as those of towers for
    pictures, and in matrix products if ``torch.set_float32_matmul_precision`` says so.
    """
    cudnn: Any = torch.backends.cudnn
    settings: list[tuple[Callable[[], Any], Callable[[Any], None], Any, Any]] = [
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest", torch.backends.cuda.matmul),
        (lambda: cudnn.allow_tf32, partial(setattr, cudnn, "allow_tf32"), False, getattr(cudnn, "conv", None)),
    ]
    with contextlib.ExitStack() as undo:
        for get, put, off, newer in settings:
            try:
                undo.callback(put, get())
                put(off)
            except RuntimeError:  # it was set by the names of torch 2.9, after which torch reads no others
                undo.callback(setattr, newer, "fp32_precision", newer.fp32_precision)
                newer.fp32_precision = "ieee"
        yield


class In32Bits(TorchFunctionMode):
    """Mode in which every operation treats 16-bit tensors and types as 32-bit ones, so weights are widened one by one, as they
    are used.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map(_widened, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)


def in_32_bits(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Switches to 32 bits, for models with 16-bit weights; autocast must be off."""
    return In32Bits() if is_narrow(model) else contextlib.nullcontext()


def is_narrow(model: nn.Module) -> bool:
    """Returns True if the model's weights, those of adapters aside, have 16 bits."""
    return next(model.parameters()).dtype in NARROW


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in NARROW else value
    return torch.float32 if isinstance(value, torch.dtype) and value in NARROW else value
