"""Floating-point operations that training a model takes, and what devices can do."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

PEAKS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA GeForce RTX 4090": 165e12,
}
"""How ``torch.cuda.get_device_name`` begins → operations per second on dense bfloat16 matrices, by NVIDIA's data sheets."""


def peak_flops(device: torch.device) -> float:
    """0 for devices that are not in the table, and for parts of one."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    known = [start for start in PEAKS if name.startswith(start) and "MIG" not in name]
    return PEAKS[max(known, key=len)] if known else 0.0


@dataclass(frozen=True, slots=True)
class WeightCounts:
    """Numbers in matrices that a token is multiplied with."""

    all: float = 0.0
    trained: float = 0.0

    @property
    def flops(self) -> float:
        """Per token: two forward, two for the gradient of what comes in, two for the gradient of a trained weight."""
        return 4 * self.all + 2 * self.trained


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """PaLM's count, ``6N + 12·L·H·Q·T`` per token (arXiv:2204.02311, appendix B): what the model needs, without computing anything
    twice. Tables that are looked up in are left out. Of experts, those that a token goes through count. Only predicted tokens
    reach the head."""

    body: WeightCounts
    head: WeightCounts
    attention: int
    """``L·H·Q``: layers, heads, and how wide these are."""

    @classmethod
    def of(cls, model: nn.Module, head: Collection[nn.Parameter] = ()) -> ModelFlops | None:
        """Of a model whose weights are whole; ``None`` where it is unknown how many of its experts a token goes through.

        Args:
            head: its parameters; those of a scalar head count little, and nothing here.
        """
        config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
        of_head = {id(weight) for weight in head}
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)} - of_head
        sizes = {"body": [0.0, 0.0], "head": [0.0, 0.0]}
        for name, weight in model.named_parameters():
            if id(weight) in tables or weight.dim() < 2:
                continue
            size: float = math.prod(weight.quant_state.shape) if hasattr(weight, "quant_state") else weight.numel()
            if ".experts." in f".{name}.":
                if (share := _experts_used(config)) is None:
                    return None
                size *= share
            whole = sizes["head" if id(weight) in of_head else "body"]
            whole[0] += size
            whole[1] += size * weight.requires_grad
        count = getattr(config, "num_hidden_layers", 0)
        several = getattr(config, "is_heterogeneous", False)
        widths = (_attention_width(config.per_layer_config[layer] if several else config) for layer in range(count))
        return cls(WeightCounts(*sizes["body"]), WeightCounts(*sizes["head"]), sum(widths))

    def training(self, prompts: Sequence[int], rows: Sequence[tuple[int, int]], predicted: int) -> float:
        """Of one pass forward and backward.

        Args:
            prompts: lengths of those that are computed by themselves, for several rows.
            rows: per row the length of what it sees, and how many of these tokens are computed for it.
            predicted: tokens that reach the head.
        """
        tokens = sum(prompts) + sum(count for _, count in rows)
        seen = sum(length * length for length in prompts) + sum(length * count for length, count in rows)
        return tokens * self.body.flops + predicted * self.head.flops + 12 * self.attention * seen


def _attention_width(config: Any) -> int:
    """Heads times their width."""
    heads: int = getattr(config, "num_attention_heads", None) or 0
    return heads * (getattr(config, "head_dim", None) or config.hidden_size // heads) if heads else 0


def _experts_used(config: Any) -> float | None:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    count = next((value for name in names if (value := getattr(config, name, None))), None)
    used = getattr(config, "num_experts_per_tok", None)
    return used / count if used and count else None
