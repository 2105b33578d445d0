"""Dropout at the inputs of adapters (arXiv:2106.09685, appendix D), in passes that train and in no others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlhf_host.errors import UserError
from rlhf_host.models.adapters import TRAINED, adapter_layers, expert_adapters


class AdapterDropout(nn.Module):
    """Dropout that acts inside ``dropping`` alone, and there only in passes with gradients. Other passes score."""

    def __init__(self, p: float):
        super().__init__()
        self.p, self.acts = p, False

    def forward(self, inputs: Tensor) -> Tensor:
        return F.dropout(inputs, self.p, self.acts and torch.is_grad_enabled())

    def extra_repr(self) -> str:
        return f"p={self.p}"


def add(model: Any, p: float) -> None:
    """Puts dropout before ``A`` of every adapter that is trained, in place. Raises ``UserError`` for adapters of experts, which see
    no inputs of their own.
    """
    if experts := expert_adapters(model):
        raise UserError(f"lora.dropout {p:g}: {experts[0]} has an adapter of experts, which peft merges: set it to 0")
    for _, layer in adapter_layers(model):
        if TRAINED in layer.lora_A:
            layer.lora_dropout[TRAINED] = AdapterDropout(p)
            model.peft_config[TRAINED].lora_dropout = p


@contextlib.contextmanager
def dropping(*models: nn.Module) -> Iterator[bool]:
    """Lets dropout of a model and of its twin act inside the block, which has to hold the backward passes too, because these may
    compute layers again. Yields False if there is none.
    """
    own = [module for model in models for module in model.modules() if isinstance(module, AdapterDropout)]
    for module in own:
        module.acts = True
    try:
        yield bool(own)
    finally:
        for module in own:
            module.acts = False


@contextlib.contextmanager
def drawing(seed: Sequence[int] | None, device: torch.device) -> Iterator[None]:
    """Makes torch draw from this seed inside the block, and afterwards as if there had been no block. None: changes nothing."""
    if seed is None:
        yield
        return
    on_gpu = device.type != "cpu"
    with torch.random.fork_rng([device] if on_gpu else [], device_type=device.type if on_gpu else "cuda"):
        torch.manual_seed(int(np.random.SeedSequence(list(seed)).generate_state(1, np.uint64)[0]))
        yield
