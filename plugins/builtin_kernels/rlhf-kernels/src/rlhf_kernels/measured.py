"""How many times as fast as its model a twin computes, on made-up rows that the model computes in a moment."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_host.comparison import example_layouts, hidden_states
from rlhf_host.protocols import Use

SHORTEST, LONGEST = 64, 1024
"""Tokens of the longest row."""
MOMENT_S = 0.3
"""Longer rows are tried as long as the model's passes over both layouts take at most this."""
REPEATS = 3


def times_as_fast(model: nn.Module, twin: nn.Module, use: Use) -> float:
    """Returns the seconds of the model's passes over those of the twin's, forward and, if weights are trained, backward."""
    length = SHORTEST
    layouts = example_layouts(model, length)
    _seconds(model, layouts, use)
    while length < LONGEST and _seconds(model, layouts, use) <= MOMENT_S:
        length *= 2
        layouts = example_layouts(model, length)
    for module in (model, twin):
        _seconds(module, layouts, use)
    own, twins = zip(*((_seconds(model, layouts, use), _seconds(twin, layouts, use)) for _ in range(REPEATS)), strict=True)
    return min(own) / min(twins)


def _seconds(module: nn.Module, layouts: Sequence[Any], use: Use) -> float:
    """Returns the seconds of a pass over each layout. Gradients are dropped as they come."""
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    hooks = [weight.register_post_accumulate_grad_hook(_drop) for weight in trained]
    try:
        _wait(use.device)
        start = time.perf_counter()
        with torch.inference_mode(False), torch.set_grad_enabled(bool(trained)):
            for layout in layouts:
                with torch.autocast(use.device.type, use.autocast, enabled=use.autocast is not None):
                    states = hidden_states(module, layout)
                if trained:
                    states.float().sum().backward()  # type: ignore[no-untyped-call]
        _wait(use.device)
        return time.perf_counter() - start
    finally:
        for hook in hooks:
            hook.remove()


def _drop(weight: Tensor) -> None:
    weight.grad = None


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
