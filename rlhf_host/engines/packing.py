"""Matrix products on CPUs: large weights laid out for oneDNN beforehand (at 32 rows 1.4 times as fast as plain products), small
ones that share their input joined into one product."""

from __future__ import annotations

from functools import partial
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
        """The operators are those that torch's own compiler emits; where a build lacks them, nothing is packed."""
        if device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        try:
            weight = torch.ones(16, 16)
            return bool((_linear(_pack(weight, 4), None, torch.ones(4, 16)) == 16).all())
        except (AttributeError, RuntimeError, NotImplementedError):
            return False

    def refresh(self, rows: int) -> None:
        """Pack the weights as they are now, for about ``rows`` rows."""
        self.packed.clear()
        self.packed.extend(_pack(weight, rows) for weight in self.weights)

    def use(self, yes: bool) -> None:
        for index, module in enumerate(self.modules):
            if yes:
                module.forward = partial(_linear, self.packed[index], module.bias)  # type: ignore[method-assign]
            else:
                module.__dict__.pop("forward", None)


SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections of one input, by the names transformers gives them, in the order in which they are called."""


class JoinedLinears:
    """Small fp32 projections of one input as one product while ``use(True)``: on two threads a product costs more to start
    than to compute.

    The weights are copied side by side; ``refresh`` copies them anew after they changed.
    """

    def __init__(self, model: nn.Module):
        self.groups: list[_Group] = []
        for parent in model.modules():
            for names in SIBLINGS:
                children = [child for name in names if _small(child := getattr(parent, name, None))]
                if (
                    len(children) == len(names)
                    and len({child.in_features for child in children}) == 1
                    and len({child.bias is None for child in children}) == 1
                ):
                    self.groups.append(_Group(children))

    def refresh(self) -> None:
        for group in self.groups:
            group.refresh()

    def use(self, yes: bool) -> None:
        for group in self.groups:
            group.use(yes)


class _Group:
    """The first of ``modules`` computes for all and leaves the others' parts for when they see the very same input."""

    def __init__(self, modules: list[nn.Linear]):
        self.modules, self.plain = modules, [module.forward for module in modules]
        self.sizes = [module.out_features for module in modules]
        self.source: Tensor | None = None
        self.parts: dict[int, Tensor] = {}

    def refresh(self) -> None:
        self.weight = torch.cat([module.weight.detach() for module in self.modules])
        self.bias = None if self.modules[0].bias is None else torch.cat([module.bias.detach() for module in self.modules])

    def use(self, yes: bool) -> None:
        for index, module in enumerate(self.modules):
            if yes:
                module.forward = partial(self._part if index else self._all, index)  # type: ignore[method-assign]
            else:
                module.__dict__.pop("forward", None)

    def _all(self, index: int, x: Tensor) -> Tensor:
        parts = F.linear(x, self.weight, self.bias).split(self.sizes, -1)
        self.source, self.parts = x, dict(enumerate(parts))
        return self.parts.pop(index)

    def _part(self, index: int, x: Tensor) -> Tensor:
        part = self.parts.pop(index, None) if x is self.source else None
        if not self.parts:
            self.source = None
        return self.plain[index](x) if part is None else part


def _small(module: object) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.numel() < SMALLEST


def _pack(weight: Tensor, rows: int) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)


def _linear(packed: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
