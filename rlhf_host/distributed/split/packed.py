"""A pass inside a module that splits its weights: results leave it as one tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rlhf_host.protocols import Tensors


def run_through(module: nn.Module, compute: Callable[..., Tensors], *inputs: Tensor) -> Tensors:
    """Runs ``compute(*inputs)`` as the pass of a module, whose ``forward`` calls the function it is given.

    Weights are fetched for the backward pass of every output that gets a gradient, and ranks whose losses use different outputs
    would fetch at different times.
    """
    results: Tensors = {}

    def packed(*inputs: Tensor) -> Tensor:
        results.update(compute(*inputs))
        return torch.cat([tensor.flatten() for tensor in results.values()] or [torch.zeros(0)])

    parts = module(packed, *inputs).split([tensor.numel() for tensor in results.values()])
    return {
        name: part.view_as(tensor) if tensor.requires_grad else part.detach().view_as(tensor)
        for (name, tensor), part in zip(results.items(), parts, strict=True)
    }
