"""Weights that are split, gathered to leave the trainer: what is gathered together, and what every process has anyway."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn

from rlhf_host.models.adapters import adapter_layers
from rlhf_host.protocols import Bucket

T = TypeVar("T")


def named_buffers(model: nn.Module) -> Bucket:
    """Returns the persistent buffers under every name they have."""
    names = set(model.state_dict())
    return [(name, tensor) for name, tensor in model.named_buffers(remove_duplicate=False) if name in names]


def merged_units(model: nn.Module, parameters: Iterable[T]) -> list[list[T]]:
    """Returns the parameters; those that are merged with each other come together."""
    layers = reversed(adapter_layers(model))  # the outermost of those that are nested owns all
    owners: dict[Any, Any] = {parameter: layer for _, layer in layers for parameter in layer.parameters()}
    units: dict[Any, list[T]] = {}
    for parameter in parameters:
        units.setdefault(owners.get(parameter, parameter), []).append(parameter)
    return list(units.values())
