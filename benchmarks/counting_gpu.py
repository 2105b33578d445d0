"""A GPU that computes nothing and counts: programs for CUDA run on it at full size, on any machine, and it notes every launch.

Its tensors say that they are on ``cuda:0`` and have no numbers, except small ones (``NUMBERS``), such as the state of sampled rows.
Small results of tensors without numbers are made up: 1, 0 for whole numbers, False for flags; and while a model is examined
(``trusting``) what a correct one gives: 0, and True for all. Tensors of the CPU are ordinary ones.

It sees operations where torch hands them to a device, after autograd and autocast, which are those of the CPU: torch without CUDA
has no others. One operation of ATen, or one custom operation (``torch.library``), is one launch, and its bytes are those that go in
and come out, each read or written once. So launches and bytes are lower bounds: some operations of ATen are several kernels, as
sorts and sums over several blocks. Attention is the fused one, for which torch chooses a kernel by device.
"""

from __future__ import annotations

import contextlib
import functools
import math
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)
ASKED = torch.device("meta", 1)
"""Device that operations are given in its place, because torch without CUDA takes no ``cuda``."""
NUMBERS = 2**15
"""Elements of the largest tensors that have numbers."""

NOTHING = {
    *("_unsafe_view", "lift_fresh", "resize_", "set_", "is_same_size"),
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"),
}
"""Operations that launch nothing, beside views."""
OVERWRITE = {"copy_", "_foreach_copy_", "fill_", "zero_", "normal_", "uniform_", "random_"}
"""Operations that do not read what they write."""
CHOOSE = {"gather", "index", "index_select", "embedding"}
"""They read as much of their first argument as they write."""
PUT = {"scatter_add_", "index_add_", "index_put_", "_index_put_impl_", "index_copy_"}
"""They read and write as much of their first argument as they are given."""
READERS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero"}
"""The host waits for their result."""
CHOOSERS = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""They wait if they choose by a mask."""
WAITING = READERS | CHOOSERS


class Launch(NamedTuple):
    """An operation on the device."""

    name: str
    bytes: int
    """Read and written."""
    flops: float
    """Operations of matrix products and attention."""
    kind: str
    """``bfloat16``, ``float32``, ...: of a matrix product; ``attention``, ``attention backward``; or nothing."""


class Wait(NamedTuple):
    """Something that the host waits for."""

    why: str
    where: str
    """File and function of this project."""


class OnGpu(Tensor):
    """A tensor of the device."""

    near: Tensor
    """Its numbers on the CPU, or its shape on ``meta``."""
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, near: Tensor) -> OnGpu:
        made = Tensor._make_wrapper_subclass(
            cls, near.shape, near.stride(), near.storage_offset(), dtype=near.dtype, device=torch.device("cpu")
        )
        made.near = near
        return made

    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @property
    def data(self) -> Tensor:
        return OnGpu(self.near)

    @data.setter
    def data(self, value: OnGpu) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.near = value.near

    def get_device(self) -> int:
        return 0

    def tolist(self) -> Any:
        return _current().read(self).tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _current().run(func, args, kwargs or {})


_running: list[CountingGpu] = []


def _current() -> CountingGpu:
    return _running[-1]


class CountingGpu:
    """The device; it is there inside a ``with`` block.

    Attributes:
        launches: how often each was seen.
        reads: what the host waited for because it read the device.
        writes: what it waited for because it wrote there from memory that the device cannot read by itself.
    """

    def __init__(self) -> None:
        self.launches: Counter[Launch] = Counter()
        self.reads: Counter[Wait] = Counter()
        self.writes: Counter[Wait] = Counter()
        self._trusts = False

    def __enter__(self) -> CountingGpu:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_as_cuda())
            stack.enter_context(_Dispatch())
            stack.enter_context(_Functions())
            _running.append(self)
            stack.callback(_running.pop)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def forget(self) -> None:
        """Counts from 0."""
        self.launches, self.reads, self.writes = Counter(), Counter(), Counter()

    @contextlib.contextmanager
    def trusting(self) -> Iterator[None]:
        """A model is examined inside the block, and found correct: distances are 0. Nothing is counted."""
        before, self._trusts = (self.launches, self.reads, self.writes, self._trusts), True
        self.forget()
        try:
            yield
        finally:
            self.launches, self.reads, self.writes, self._trusts = before

    def place(self, model: nn.Module) -> None:
        """Moves a model without weights here."""
        moved: dict[int, Tensor] = {}
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    new = moved.setdefault(id(weight), nn.Parameter(OnGpu(weight.detach()), weight.requires_grad))
                    module._parameters[name] = new  # type: ignore[assignment]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = moved.setdefault(id(buffer), OnGpu(buffer))

    def read(self, tensor: OnGpu) -> Tensor:
        """Returns a tensor's numbers on the CPU."""
        self._wait(self.reads, "read")
        self._count("read", 2 * _bytes(tensor))
        return _numbers(tensor.near, self._trusts).clone()

    def move(self, tensor: Tensor, *, waits: bool) -> OnGpu:
        """Returns a copy of an ordinary tensor here."""
        if tensor.requires_grad:
            raise NotImplementedError("gradients of what is moved to the GPU are not followed")
        if waits and tensor.device.type == "cpu":
            self._wait(self.writes, "written, and not non_blocking")
        made = OnGpu(tensor.clone() if tensor.numel() <= NUMBERS else tensor.to("meta"))
        self._count("write", 2 * _bytes(made))
        return made

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs or pretends an operation."""
        given = _tensors((args, kwargs.values()) if kwargs else args, [])
        here = [value for value in given if isinstance(value, OnGpu)]
        if not here and kwargs.get("device") != ASKED:
            return func(*args, **kwargs)
        traits = _traits(func)
        if traits.composite:  # under inference_mode torch does not take it apart before
            with _Dispatch():
                return func.decompose(*args, **kwargs)
        name = traits.name
        if len(here) < len(given) or not here:
            if name in ("_to_copy", "copy_"):
                return self._transfer(name, args, kwargs)
            self._refuse_others(name, given)
        if name in WAITING and (name in READERS or any(map(_is_mask, args[1]))):
            self._wait(self.reads, name if name in READERS else f"{name} by a mask")
        result = self._compute(func, traits, args, kwargs, here)
        if traits.launches and not self._trusts:
            self.launches[_launch(func, name, args, here, _tensors(result, []))] += 1
        return result

    def _refuse_others(self, name: str, given: list[Tensor]) -> None:
        """Raises as CUDA does for tensors that are elsewhere."""
        if any(value.dim() and not isinstance(value, OnGpu) for value in given):
            if name not in CHOOSERS:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but {name} got some on cuda:0 and some on cpu"
                )
            self._wait(self.writes, "written: indices on the CPU")

    def _transfer(self, name: str, args: Any, kwargs: Any) -> Any:
        """Copies between the CPU and the device."""
        if name == "_to_copy":
            source = args[0] if kwargs.get("dtype") is None else args[0].to(kwargs["dtype"])
            return self.move(source, waits=not kwargs.get("non_blocking", False))
        target, source = args[:2]
        if isinstance(source, OnGpu):
            return aten.copy_(target, self.read(source))
        blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        moved = self.move(source, waits=blocks and source.dim() > 0)
        if target.near.device.type == "cpu":
            target.near.copy_(_numbers(moved.near, self._trusts))
        return target

    def _compute(self, func: Any, traits: _Traits, args: Any, kwargs: Any, here: list[OnGpu]) -> Any:
        known = all(value.near.device.type == "cpu" for value in here)
        if traits.name == "_local_scalar_dense":
            if self._trusts and here[0].dtype.is_floating_point:
                return 0.0  # a distance
            return _numbers(here[0].near, self._trusts).item()
        if traits.name in READERS and not known:
            raise NotImplementedError(f"{traits.name} of a tensor without numbers")
        own = known and traits.of_torch and (here or _is_small(func, args, kwargs))
        wrapped: dict[int, Tensor] = {}
        kept = []  # so that no other tensor gets the identity of one of them

        def near(value: Tensor) -> Tensor:
            other = value.near if isinstance(value, OnGpu) else value
            if not own and other.device.type == "cpu" and (other is not value or other.dim()):
                other = other.to("meta")
            wrapped[id(other)] = value
            kept.append(other)
            return other

        def back(value: Tensor) -> Tensor:
            if id(value) in wrapped:
                return wrapped[id(value)]
            if traits.launches and own and value.numel() > NUMBERS:
                return OnGpu(value.to("meta"))
            if traits.launches and not own and value.numel() <= NUMBERS:
                return OnGpu(_made_up(value, self._trusts and traits.name == "all", 0 if self._trusts else 1))
            return OnGpu(value)

        near_args, near_kwargs = _mapped(args, near), _mapped(kwargs, near)
        if "device" in kwargs:
            near_kwargs["device"] = torch.device("cpu" if own else "meta")
        return _mapped(func(*near_args, **near_kwargs), back)

    def _count(self, name: str, size: int) -> None:
        self.launches[Launch(name, size, 0, "")] += 1

    def _wait(self, waits: Counter[Wait], why: str) -> None:
        frames = [
            f"{frame.filename.rpartition('/')[2]}, {frame.name}"
            for frame in traceback.extract_stack()
            if "rlhf_" in frame.filename
        ]
        waits[Wait(why, frames[-1] if frames else "outside")] += 1


class _Dispatch(TorchDispatchMode):
    """Sees operations that make tensors from nothing."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which takes longer than the operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _current().run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Takes ``cuda`` as a device wherever Python names one; operations then see ``ASKED``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.to, Tensor.cpu, Tensor.cuda):
            return self._to(func, *args, **kwargs)
        if _is_gpu(kwargs.get("device")):
            if func in (torch.tensor, torch.as_tensor, torch.asarray):
                return _current().move(func(*args, **{**kwargs, "device": "cpu"}), waits=True)
            kwargs = {**kwargs, "device": ASKED}
        return func(*args, **kwargs)

    def _to(self, func: Any, tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        if func is Tensor.to:
            args = tuple(DEVICE if isinstance(arg, OnGpu) else arg for arg in args)
            device, dtype, free, _ = torch._C._nn._parse_to(*args, **kwargs)
        else:
            device, dtype, free = torch.device("cpu") if func is Tensor.cpu else DEVICE, None, False
        if isinstance(tensor, OnGpu) and device is not None and not _is_gpu(device):
            if tensor.requires_grad:
                raise NotImplementedError("gradients of what is read from the GPU are not followed")
            moved = _current().read(tensor)
            return moved if dtype is None else moved.to(dtype)
        if not isinstance(tensor, OnGpu) and _is_gpu(device):
            return _current().move(tensor if dtype is None else tensor.to(dtype), waits=not free)
        if device is not None and not _is_gpu(device):
            return tensor.to(device, dtype or tensor.dtype, copy=copy)
        return tensor.to(dtype or tensor.dtype, copy=copy)


def _is_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type


def _is_mask(index: Any) -> bool:
    return isinstance(index, OnGpu) and index.dtype in (torch.bool, torch.uint8)


class _Traits(NamedTuple):
    """Name of an operation, and facts that follow from its kind."""

    name: str
    of_torch: bool
    launches: bool
    composite: bool


@functools.cache
def _traits(func: Any) -> _Traits:
    name = func._schema.name.removeprefix("aten::")
    has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
    composite = has("CompositeImplicitAutograd") and not has("CPU") and not has("CUDA")
    return _Traits(name, func.namespace == "aten", not func.is_view and name not in NOTHING, composite)


def _tensors(values: Any, found: list[Tensor]) -> list[Tensor]:
    """Adds the tensors in nested values to ``found``."""
    if isinstance(values, Tensor):
        found.append(values)
    elif isinstance(values, (tuple, list, type({}.values()))):
        for value in values:
            _tensors(value, found)
    return found


def _mapped(values: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Returns nested values with other tensors."""
    if isinstance(values, Tensor):
        return function(values)
    if isinstance(values, (tuple, list)):
        return type(values)([_mapped(value, function) for value in values])
    return {key: _mapped(value, function) for key, value in values.items()} if isinstance(values, dict) else values


def _is_small(func: Any, args: Any, kwargs: Any) -> bool:
    """Returns True if what is made from nothing has few elements."""
    made = func(*args, **{**kwargs, "device": torch.device("meta")})
    return bool(made.numel() <= NUMBERS)


def _numbers(near: Tensor, trusts: bool) -> Tensor:
    return near if near.device.type == "cpu" else _made_up(near, False, 0 if trusts else 1)


def _made_up(like: Tensor, flag: bool, number: float) -> Tensor:
    value = number if like.dtype.is_floating_point else flag
    return aten.full.default(list(like.shape), value, dtype=like.dtype, device=torch.device("cpu"))


def _bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's distinct elements."""
    return tensor.element_size() * math.prod(
        size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size
    )


def _launch(func: Any, name: str, args: Any, here: list[OnGpu], outs: list[Any]) -> Launch:
    """Returns what an operation reads, writes and computes."""
    given = {id(value): value for value in here}
    new = sum(_bytes(value) for key, value in {id(value): value for value in outs}.items() if key not in given)
    written = [
        value
        for argument, own in zip(func._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
        for value in _on_gpu(own)
    ]
    size = sum(map(_bytes, given.values())) + new + sum(map(_bytes, written))
    if name in OVERWRITE:
        size -= sum(map(_bytes, _on_gpu(args[:1])))
    elif name == "_fused_adamw_":  # it would write gradients where it is given a scale
        size -= sum(map(_bytes, args[1]))
    elif name in CHOOSE:
        size = 2 * new + sum(map(_bytes, _on_gpu(args[1:])))
    elif name in PUT:
        size = 3 * max(map(_bytes, _on_gpu(args[1:])), default=0)
    flops, kind = _flops(name, args)
    if name == "_to_copy" and here and outs and here[0].dtype != outs[0].dtype:
        name = f"cast {_short(here[0])} to {_short(outs[0])}"
    elif "scaled_dot_product" in name:
        name = kind
    elif flops:
        name = f"{name} {kind}"
    return Launch(name, size, flops, kind)


def _on_gpu(values: Any) -> list[OnGpu]:
    return [value for value in _tensors(values, []) if isinstance(value, OnGpu)]


def _flops(name: str, args: Any) -> tuple[float, str]:
    if name in ("mm", "bmm", "addmm", "addmm_", "baddbmm"):
        first, second = _on_gpu(args)[-2:]
        return 2.0 * first.numel() * second.shape[-1], _short(first)
    if "scaled_dot_product" in name:
        backward = "backward" in name
        query, key = args[1:3] if backward else args[:2]
        causal = args[7 if backward else 4] if len(args) > 4 else False
        pairs = query.numel() * key.shape[-2] * (0.5 if causal else 1.0)
        return 4.0 * pairs * (2.5 if backward else 1.0), "attention backward" if backward else "attention"
    return 0.0, ""


def _short(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@contextlib.contextmanager
def _as_cuda() -> Iterator[None]:
    """Answers torch's questions about ``cuda`` as a machine with a GPU does; its autocast is that of the CPU."""
    autocast = torch.amp.autocast_mode.autocast
    start, enabled, dtype = autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype

    backward = torch.autograd._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with _Functions():  # torch has switched it off, because backward() is one of its functions
            return backward(*args, **kwargs)

    group = torch._C._group_tensors_by_device_and_dtype

    def grouped(tensors: Any, with_indices: bool = False) -> Any:
        groups = group(tensors, with_indices).items()
        return {(DEVICE if isinstance(own[0][0], OnGpu) else device, kind): (own, at) for (device, kind), (own, at) in groups}

    def other(device: str) -> str:
        return "cpu" if device == DEVICE.type else device

    def begin(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        start(self, other(device_type), *args, **kwargs)

    with (
        patch.object(autocast, "__init__", begin),
        patch.object(torch, "is_autocast_enabled", lambda device=DEVICE.type: enabled(other(device))),
        patch.object(torch, "get_autocast_dtype", lambda device: dtype(other(device))),
        patch.object(torch.autograd, "_engine_run_backward", run_backward),
        patch.object(torch._C, "_group_tensors_by_device_and_dtype", grouped),
        patch.object(_foreach_utils, "_foreach_supported_types", [*_foreach_utils._foreach_supported_types, OnGpu]),
        patch.object(torch.cuda, "is_bf16_supported", lambda *_, **__: True),
        patch.object(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100 80GB HBM3"),
        patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
    ):
        yield
