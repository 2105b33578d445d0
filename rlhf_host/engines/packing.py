"""A model's matrix products with weights laid out beforehand."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from rlhf_host.models.products import has_onednn, pack, packed_product

SMALLEST = 1 << 16
"""Elements of a weight below which the plain product is as fast."""


class PackedLinears:
    """The larger fp32 ``nn.Linear`` modules of ``model``, run from packed copies while ``use(True)``.

    The copies take as much memory as the weights; ``refresh`` makes them anew after the weights changed.
    """

    def __init__(self, model: nn.Module):
        self.modules = [
            module
            for module in model.modules()
            if type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.numel() >= SMALLEST
        ]
        self.weights = [module.weight for module in self.modules]
        self.packed: list[Tensor] = []

    @staticmethod
    def available(device: torch.device) -> bool:
        return device.type == "cpu" and has_onednn()

    def refresh(self) -> None:
        """Pack the weights as they are now."""
        self.packed.clear()
        self.packed.extend(pack(weight) for weight in self.weights)

    def use(self, yes: bool) -> None:
        for index, module in enumerate(self.modules):
            if yes:
                module.forward = partial(packed_product, weight=self.packed[index], bias=module.bias)  # type: ignore[method-assign]
            else:
                module.__dict__.pop("forward", None)
