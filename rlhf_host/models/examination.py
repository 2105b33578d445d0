"""Examination of a model before passes run it: finds the module that computes, and the head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rlhf_host.errors import UserError, first_line
from rlhf_host.models.heads import find_head, scalar_head
from rlhf_host.models.logprobs import token_logprobs
from rlhf_host.models.output_heads import LanguageHead, ScalarHead
from rlhf_host.models.precision import evaluation
from rlhf_host.protocols import Kernels, Use


def examine(
    model: Any, use: Use, kernels: Kernels | None, probe: Any = None
) -> tuple[nn.Module, ScalarHead | LanguageHead, dict[nn.Module, nn.Module]]:
    """Finds the twin that computes instead of a model, and the model's head.

    Args:
        kernels: makes twins; default: the model computes.
        probe: a small model of the same kind, which is examined in its place; default: the model itself, whose weights must be
            whole.

    Returns:
        What computes, its head, and the modules that passes may run, each with the one that can be run now in its place.
    """
    examined = model if probe is None else probe
    if probe is None:
        compute = twin = model if kernels is None else kernels.module(model, use)
    else:
        twin, compute = (probe, model) if kernels is None else kernels.like(probe, model, use)
    return compute, _head(model, examined, use, kernels), {compute: twin, model: examined}


def _head(model: Any, examined: Any, use: Use, kernels: Kernels | None) -> ScalarHead | LanguageHead:
    if (linear := scalar_head(model)) is not None:
        return ScalarHead(linear)
    with torch.no_grad(), evaluation(examined), torch.autocast(use.device.type, use.autocast, use.autocast is not None):
        try:
            found = find_head(examined)
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            name = type(examined).__name__
            raise UserError(
                f"{name} does not run over plain rows of tokens: {type(error).__name__}: {first_line(error)}"
            ) from error
    if found is None:
        return LanguageHead(None, use.autocast)
    logprobs = token_logprobs if kernels is None else kernels.token_logprobs(use)
    return LanguageHead(replace(found, linear=model.get_output_embeddings()), use.autocast, logprobs)
