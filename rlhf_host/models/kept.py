"""Memory that a pass keeps for its backward pass: which share of it belongs to the rows that attention gathers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_host.models.layouts import Layout, shared_layout
from rlhf_host.models.loading import context_length
from rlhf_host.models.trial import FAILURES

ROWS, LENGTH = 4, 32
"""Number and tokens of the rows that are measured: memory grows linearly with both."""


def gathered_share(states: Callable[[Layout], Tensor], model: nn.Module) -> float:
    """Measures how much of what a token of a padded row keeps for the backward pass is kept by attention, per row that it
    gathers; the rest is kept once per token of a shared line. So ``n`` rows with one prompt keep ``line + share · (padded −
    line)`` times what a padded token keeps.

    Where layers are computed again in the backward pass, their inputs are kept, and what one layer keeps.

    Args:
        states: hidden states of a layout.
        model: the model with the weights; it is left as it was.

    Returns:
        A share from 0 to 1; 1 if attention does not gather rows, or the model fails.
    """
    length = min(LENGTH, context_length(model))
    completion = max(1, length // 4)
    prompt = length - completion

    def measure(rows: int, sharing: list[int]) -> tuple[int, Tensor]:
        completions = torch.ones(rows * completion, dtype=torch.int64)
        layout = shared_layout([[1] * prompt] * rows, completions, [completion] * rows, sharing)
        with recorded(model) as kept:
            result = states(layout)
        return sum(kept.values()), result

    try:
        with torch.inference_mode(False), torch.enable_grad(), _all_trained(model), _nothing_twice(model) as recomputed:
            few, _ = measure(ROWS // 2, [*range(ROWS // 2)])
            apart, result = measure(ROWS, [*range(ROWS)])
            together, _ = measure(ROWS, [0] * ROWS)
            width = model.config.get_text_config().hidden_size * result.element_size()  # type: ignore[operator, union-attr]
    except FAILURES:
        return 1.0
    whole, once = (apart - few) / (ROWS // 2 * length), (apart - together) / ((ROWS - 1) * prompt)
    gathered = whole - once
    if layers := len(recomputed):
        gathered, whole = gathered / layers, whole / layers + layers * width
    return min(1.0, max(0.0, gathered / whole)) if whole > 0 else 1.0


@contextlib.contextmanager
def recorded(model: nn.Module) -> Iterator[dict[int, int]]:
    """Records storage → bytes of everything that operations keep for a backward pass, beside the model's own tensors. A storage
    counts once, however many operations keep it.
    """
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}
    alive: list[Any] = []  # so that no other storage takes the place of one that was counted

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own and storage._cdata not in kept:
            kept[storage._cdata] = storage.nbytes()
            alive.append(storage)
        return tensor.detach()  # itself it would keep the graph that keeps it, for good

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


@contextlib.contextmanager
def _nothing_twice(model: nn.Module) -> Iterator[list[Any]]:
    """Keeps layers from computing again in the backward pass; yields those that would."""
    layers: list[Any] = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing
    ]
    try:
        for layer in layers:
            layer.gradient_checkpointing = False
        yield layers
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True


@contextlib.contextmanager
def _all_trained(model: nn.Module) -> Iterator[None]:
    """Gives all weights of a frozen model gradients, so that its rows have the cost that they have in the role that trains."""
    frozen = [weight for weight in model.parameters() if weight.is_floating_point()]
    if any(weight.requires_grad for weight in model.parameters()):
        frozen = []
    try:
        for weight in frozen:
            weight.requires_grad_(True)
        yield
    finally:
        for weight in frozen:
            weight.requires_grad_(False)
