"""Floating-point operations needed to train a model, and the peak of devices."""

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
"""Start of ``torch.cuda.get_device_name`` → operations per second on dense bfloat16 matrices, from NVIDIA's data sheets."""


def peak_flops(device: torch.device) -> float:
    """Returns 0 for devices that are not in the table, and for parts of one."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    known = [start for start in PEAKS if name.startswith(start) and "MIG" not in name]
    return PEAKS[max(known, key=len)] if known else 0.0


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """PaLM's count, ``6N + 12·L·H·Q·T`` per token (arXiv:2204.02311, appendix B): the operations that the model needs, with
    nothing computed twice. Lookup tables are left out. Only the experts that a token uses count. Only predicted tokens reach
    the head.
    """

    body: float
    """Operations per token: two for each weight forward, two for its input's gradient, two for its own where it is trained."""
    head: float
    """The same for the head, per predicted token."""
    attention: int
    """``L·H·Q``: layers, heads, and the width of a head."""

    @classmethod
    def of(cls, model: nn.Module, head: Collection[nn.Parameter] = ()) -> ModelFlops | None:
        """Returns the count for a model whose weights are whole; None if it is unknown how many of its experts a token uses.

        Args:
            head: parameters of the head; those of a scalar head are few and are not counted.
        """
        config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
        of_head = {id(weight) for weight in head}
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)} - of_head
        flops = {"body": 0.0, "head": 0.0}
        for name, weight in model.named_parameters():
            if id(weight) in tables or weight.dim() < 2:
                continue
            size: float = math.prod(weight.quant_state.shape) if hasattr(weight, "quant_state") else weight.numel()
            if ".experts." in f".{name}.":
                if (share := _experts_used(config)) is None:
                    return None
                size *= share
            flops["head" if id(weight) in of_head else "body"] += (6 if weight.requires_grad else 4) * size
        count = getattr(config, "num_hidden_layers", 0)
        several = getattr(config, "is_heterogeneous", False)
        widths = (_attention_width(config.per_layer_config[layer] if several else config) for layer in range(count))
        return cls(flops["body"], flops["head"], sum(widths))

    def training(self, prompts: Sequence[int], rows: Sequence[tuple[int, int]], predicted: int) -> float:
        """Returns the operations of one pass forward and backward.

        Args:
            prompts: lengths of prompts that are computed once for several rows.
            rows: per row, the number of tokens that it sees, and how many of them are computed for it.
            predicted: tokens that reach the head.
        """
        tokens = sum(prompts) + sum(count for _, count in rows)
        seen = sum(length * length for length in prompts) + sum(length * count for length, count in rows)
        return tokens * self.body + predicted * self.head + 12 * self.attention * seen

    def work(self, prompt: int, completions: Sequence[int]) -> float:
        """Returns the operations that rows of one prompt take where it is computed once and no token attends to later ones: what
        is in proportion to the time of a rank.
        """
        predicted = sum(completions)
        seen = prompt * prompt + sum((prompt + length) ** 2 - prompt * prompt for length in completions)
        return (prompt + predicted) * self.body + predicted * self.head + 6 * self.attention * seen


def _attention_width(config: Any) -> int:
    """Returns heads times their width."""
    heads: int = getattr(config, "num_attention_heads", None) or 0
    return heads * (getattr(config, "head_dim", None) or config.hidden_size // heads) if heads else 0


def _experts_used(config: Any) -> float | None:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    count = next((value for name in names if (value := getattr(config, name, None))), None)
    used = getattr(config, "num_experts_per_tok", None)
    return used / count if used and count else None
