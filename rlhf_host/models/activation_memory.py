"""Memory of a pass with gradients: which share of it belongs to the rows that attention gathers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_host.models.layout_check import FAILURES
from rlhf_host.models.layouts import Layout, shared_layout
from rlhf_host.models.loading import context_length

ROWS, LENGTH = 4, 32
"""Number and tokens of the rows that are measured: memory grows linearly with both."""

GRADIENTS = 2.0
"""Memory of the gradients of what attention gathered, over that of what it gathered. In fused kernels on GPUs those of queries are
in 32 bits too, and those of keys there for each head of the queries.
"""


@dataclass(frozen=True, slots=True)
class Gathered:
    """The share of attention, per row that it gathers, in what a token of a padded row keeps for the backward pass. The rest is
    kept once per token of a shared line.
    """

    share: float = 1.0
    """From 0 to 1; 1, the default: everything is kept for each row, as far as is known."""
    inputs: float = 0.0
    """Share of the layers' inputs, where layers are computed again in the backward pass. They keep these, and what one layer
    keeps.
    """
    layers: int = 1
    """Number of layers that keep what they compute."""

    def cached_tokens(self, line: int, padded: int) -> float:
        """Returns how many tokens of padded rows keep as much for the backward pass as a shared line.

        Args:
            line: tokens of the line.
            padded: tokens of its rows, each with its prompt.
        """
        return line + self.share * max(0, padded - line)

    def cost(self, line: int, padded: int) -> int:
        """Returns the same for all memory that they need at once.

        With short answers to long prompts, most is needed in the backward pass of one layer's attention. There the gradients of
        gathered rows are beside the rows, while the rest of what the layer kept is free already.
        """
        if self.share == 1:
            return max(line, padded)
        gradients, free = GRADIENTS * self.share * padded, (1 - self.share - self.inputs) * line
        return math.ceil(self.cached_tokens(line, padded) + max(0.0, gradients - free) / self.layers)


def gathered(states: Callable[[Layout], Tensor], model: nn.Module, depth: int) -> Gathered:
    """Measures what a pass keeps. Returns the default ``Gathered`` if the model fails.

    Args:
        states: hidden states of a layout.
        model: the model with the weights, or its probe; it is left as it was.
        depth: number of layers of the model.
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
        return Gathered()
    whole, once = (apart - few) / (ROWS // 2 * length), (apart - together) / ((ROWS - 1) * prompt)
    rows, inputs, live = whole - once, 0.0, depth
    if again := len(recomputed):
        every = sum(isinstance(module, GradientCheckpointingLayer) for module in model.modules())
        part = max(1, every - again) / every
        rows, inputs, live = part * rows, depth * width * again / every, max(1, depth * (every - again) // every)
        whole = part * whole + inputs
    share = min(1.0, max(0.0, rows / whole)) if whole > 0 else 1.0
    return Gathered(share, inputs / whole, live) if share < 1 else Gathered()


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
