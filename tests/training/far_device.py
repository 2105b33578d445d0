"""A device of its own type whose numbers are in CPU tensors, and which counts whoever waits for it.

``register`` changes torch for good, so this is for processes of their own.
"""

from __future__ import annotations

import traceback
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

NAME = "far"
aten = torch.ops.aten
READERS = {
    aten._local_scalar_dense,
    aten.item,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.equal,
    aten.is_nonzero,
}
CHOOSERS = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class _Module(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def register() -> None:
    """Makes ``far`` a device of torch."""
    torch._C._set_only_lift_cpu_tensors(True)  # so that torch.tensor copies to it, which a mode sees
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())


class Far(Tensor):
    """A tensor on the device."""

    near: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, near: Tensor) -> Far:
        made = Tensor._make_wrapper_subclass(
            cls, near.shape, near.stride(), near.storage_offset(), dtype=near.dtype, device=torch.device(NAME, 0)
        )
        made.near = near
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None) -> Any:
        return _compute(func, args, kwargs or {})

    def tolist(self) -> Any:  # torch has none for subclasses
        return self.cpu().tolist()


class Reach(TorchDispatchMode):
    """Computes what is on the device; ``waits`` has the operation and the place of everything that waited."""

    waits: ClassVar[list[tuple[str, str]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        return _compute(func, args, kwargs or {})


def _far(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _waits(func: Any, args: Any, kwargs: Any, reaches: bool) -> str | None:
    """Says why the operation waits on a GPU; None: it does not."""
    packet = func.overloadpacket
    if packet in (aten._to_copy, aten.to, aten.copy_):  # inference mode does not take ``to`` apart
        source = args[1] if packet is aten.copy_ else args[0]
        device = args[0].device if packet is aten.copy_ else kwargs.get("device")
        here, there = isinstance(source, Far), isinstance(source, Far) if device is None else _far(device)
        free = kwargs.get("non_blocking", False) or (packet is aten.copy_ and len(args) > 2 and args[2])
        if here and not there:
            return "read"
        return "written, and not non_blocking" if there and not here and not free else None
    if reaches and packet in READERS:
        return str(packet)
    chosen = args[1] if reaches and packet in CHOOSERS else ()
    return f"{packet} by a mask" if any(isinstance(at, Far) and at.dtype == torch.bool for at in chosen) else None


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    found: list[Far] = []
    tree_map(lambda value: found.append(value) if isinstance(value, Far) else None, (args, kwargs))
    if (why := _waits(func, args, kwargs, bool(found))) is not None:
        frames = [
            frame for frame in traceback.extract_stack() if "rlhf_" in frame.filename and "far_device" not in frame.filename
        ]
        Reach.waits.append((why, f"{frames[-1].filename.rpartition('/')[2]}, {frames[-1].name}" if frames else "outside"))

    def near(value: Any) -> Any:
        if isinstance(value, Far):
            return value.near
        return torch.device("cpu") if isinstance(value, torch.device) and _far(value) else value

    result = func(*tree_map(near, args), **tree_map(near, kwargs))
    device = kwargs.get("device")
    if not (found if device is None else _far(device)):
        return result
    if func._schema.is_mutable and isinstance(result, Tensor):
        return args[0]
    return tree_map(lambda value: Far(value) if isinstance(value, Tensor) else value, result)
