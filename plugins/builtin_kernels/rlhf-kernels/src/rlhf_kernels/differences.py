"""Differences of a twin from its model: gradients, and anything that a plugin has changed in the model itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_host.comparison import EXACT, ROUGH, beyond, example_layouts, hidden_states, without_tf32

HELD = 2**16
"""Number of elements of a parameter's gradient that are compared."""


def gradients_problem(model: nn.Module, twin: nn.Module, *, exact: bool) -> str | None:
    """Returns why the twin's gradients are not the model's, over rows of at most 64 tokens; None if they are."""
    if not any(weight.requires_grad for weight in model.parameters()):
        return None
    for layout in example_layouts(model):
        own, twins = (_gradients(module, layout, model) for module in (model, twin))
        if own.keys() != twins.keys():
            return f"the gradient of {min(own.keys() ^ twins.keys())} is missing"
        # Some gradients are nothing but rounding, such as those of keys' biases.
        least = 1e-4 * max((float(gradient.norm()) for gradient in own.values()), default=0.0)
        for name, gradient in own.items():
            gap = float((twins[name] - gradient).norm() / gradient.norm().clamp(min=max(least, 1e-30)))
            if not gap <= (most := EXACT if exact else ROUGH):
                return f"the gradient of {name} differs by {beyond(gap, most)}"
    return None


def _gradients(module: nn.Module, layout: Any, model: nn.Module) -> dict[str, Tensor]:
    """Returns name → some float32 elements of the parameter's gradient; those of the whole model may be too many to hold."""
    gradients: dict[str, Tensor] = {}

    def keep(weight: Tensor, name: str) -> None:
        assert weight.grad is not None
        gradients[name] = weight.grad.flatten()[:: weight.numel() // HELD + 1].float()
        weight.grad = None

    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    hooks = [weight.register_post_accumulate_grad_hook(partial(keep, name=name)) for name, weight in trained]
    try:
        with torch.inference_mode(False), torch.enable_grad(), without_tf32():
            states = hidden_states(module, layout).float()
            pull = torch.randn(states.shape, generator=torch.Generator().manual_seed(0)).to(states.device)
            if states.requires_grad:  # not where the head alone is trained
                (states * pull).sum().backward()  # type: ignore[no-untyped-call]
    finally:
        for hook in hooks:
            hook.remove()
    return gradients


def appearance(model: nn.Module) -> tuple[Any, ...]:
    """Returns a value that stays equal while nobody changes the model: its configuration, its modules' code and hooks, its
    weights.
    """
    modules = [
        (type(module), vars(module).get("forward"), len(module._forward_hooks), len(module._forward_pre_hooks))
        for module in model.modules()
    ]
    own = {*model.parameters(), *model.buffers()}  # what 4 bits need beside them is made anew whenever it is asked for
    saved = [tensor for tensor in model.state_dict(keep_vars=True).values() if tensor in own]
    versions = [(id(tensor), None if tensor.is_inference() else tensor._version) for tensor in saved]
    config: Any = model.config
    return config.to_dict(), config._attn_implementation, modules, versions
