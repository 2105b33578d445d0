"""A stand-in for CUDA graphs on a CPU: it records the operations of a function and does them again on the same memory, so what
only Python changes between two replays stays as it was. It refuses what would wait for a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

aten = torch.ops.aten
WAITING = {aten._local_scalar_dense, aten.item, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero, aten.lift_fresh}
"""Reads of the device, and ``lift_fresh``: a tensor made of Python's numbers, which is copied to the device."""


class Recorded(TorchDispatchMode):
    """Operations in their order, with the tensors that they read and wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in WAITING:
            raise RuntimeError(f"a graph cannot wait for the device: {func}")
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        held = {one.untyped_storage().data_ptr() for one in inputs}
        if func._schema.is_mutable or not all(one.untyped_storage().data_ptr() in held for one in outputs):
            self.operations.append((func, args, kwargs, outputs))
        return result

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, outputs in self.operations:
            for old, new in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
                if new is not old and new.data_ptr() != old.data_ptr():
                    old.copy_(new)


def record(work: Callable[[], None]) -> Callable[[], None]:
    """Captures ``work`` as ``cuda_graph`` does."""
    recorded = Recorded()
    with recorded:
        work()
    GRAPHS.append(recorded)
    return recorded.replay


GRAPHS: list[Recorded] = []
"""All that were captured."""


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]
