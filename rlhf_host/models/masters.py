"""Weights in 16 bits to compute with, and the masters of those that are trained: the float32 weights that the optimizer steps."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from rlhf_host.errors import first_line
from rlhf_host.models import quantized
from rlhf_host.models.dtypes import NARROW, master_of
from rlhf_host.models.heads import decoder_of, scalar_head
from rlhf_host.models.precision import evaluation

log = logging.getLogger(__name__)


def autocast_of(model: Any, choice: str, device: Any, rounds: bool = False, keep_all: bool = False) -> torch.dtype | None:
    """Returns the type that passes of a model need autocast for; None: its weights have the type that is computed in.

    Args:
        choice: a setting: ``auto``, ``off`` or ``bfloat16``.
        rounds: the weights are given that type, as ``narrow`` does.
    """
    capable = device.type == "cuda" and torch.cuda.is_bf16_supported()
    if choice == "off" or (choice == "auto" and not capable):
        return None
    if rounds:
        narrow(model, torch.bfloat16, keep_all=keep_all)
    return None if all(weight.dtype in NARROW for weight in rounded_weights(model)) else torch.bfloat16


@torch.no_grad()
def narrow(model: Any, dtype: torch.dtype, *, keep_all: bool = False) -> None:
    """Rounds ``rounded_weights`` to ``dtype``, in place, if the model runs with them. Those that are trained keep what they were as
    their master, and so do frozen ones that lose digits, in a model that is written as a whole.

    Args:
        keep_all: all of them do.
    """
    written = not hasattr(model, "peft_config") and any(weight.requires_grad for weight in model.parameters())
    rounded = [weight for weight in rounded_weights(model) if weight.dtype != dtype]
    for weight in rounded:
        full = weight.data
        weight.data, weight.written_as = full.to(dtype), full.dtype
        if keep_all or weight.requires_grad or not weight.data.to(full.dtype).equal(full):
            weight.master = nn.Parameter(full, weight.requires_grad)
    problem = _problem(model)
    for weight in rounded:
        if problem is not None:
            weight.data = master_of(weight).data.to(weight.written_as)
        if problem is not None or not (keep_all or written or weight.requires_grad):
            vars(weight).pop("master", None)
    if problem is not None:
        log.warning("%s does not run with weights in 16 bits, so they stay, under autocast: %s", type(model).__name__, problem)
        return
    for layer in quantized.layers(model).values():
        layer.weight.written_as, layer.compute_dtype = layer.compute_dtype, dtype


def _problem(model: Any) -> str | None:
    """Returns why a model does not run as it is; None if it does."""
    ids = torch.tensor([[1, 3, 2, 4, 1, 5]], device=model.device) % model.config.get_text_config().vocab_size
    try:
        with evaluation(model):
            (model if scalar_head(model) is None else decoder_of(model))(input_ids=ids, use_cache=False)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        return first_line(error)
    return None


def rounded_weights(model: Any) -> Iterator[Any]:
    """Yields the weights that have 16 bits where passes compute in 16 bits: all that transformers loads so, norms and routers too.
    A class may keep some in 32 bits, and a scalar head is multiplied in 32 bits.
    """
    kept = [*(getattr(model, "_keep_in_fp32_modules_strict", None) or ()), *([] if scalar_head(model) is None else ["score."])]
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and not any(fnmatchcase(name, f"*{each}*") for each in kept):
            yield weight


@torch.no_grad()
def renew(weights: Iterable[nn.Parameter]) -> None:
    """Rounds masters anew, into the weights that have one."""
    pairs = [(weight, master_of(weight)) for weight in weights if master_of(weight) is not weight]
    if pairs:
        rounded, masters = zip(*pairs, strict=True)
        torch._foreach_copy_(rounded, masters)
