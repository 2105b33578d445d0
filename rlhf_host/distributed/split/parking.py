"""Device memory that is given away for a while: its bytes wait in host memory, and every tensor over it stays the same object."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from rlhf_host.errors import RunError

CHUNK_BYTES = 2**26
"""Size of a buffer. A power of two, because torch rounds pinned memory up to one."""


class Parking:
    """Host memory for the bytes of a device. Its buffers are made at the first use, pinned for CUDA, and used again.

    Storages are emptied in place, so views, parameters and a library's own references are right again when the bytes are back.
    Until then nothing may read them.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._buffers: list[Tensor] = []
        self._parked: list[tuple[torch.UntypedStorage, int]] = []

    def __bool__(self) -> bool:
        """True while something is parked."""
        return bool(self._parked)

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers, in use or not."""
        return len(self._buffers) * CHUNK_BYTES

    def park(self, tensors: Iterable[Tensor]) -> None:
        """Moves the memory of these tensors to the buffers, except what is not on the device, or cannot be freed."""
        storages = distinct(tensor for tensor in tensors if tensor.device == self._device)
        self._parked = [(each, each.nbytes()) for each in storages.values() if each.nbytes() and each.resizable()]
        for device, host in self._pairs():
            host.copy_(device, non_blocking=True)
        self._settle()
        for storage, _ in self._parked:
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def bring_back(self) -> None:
        """Moves all of it back."""
        for storage, size in self._parked:
            storage.resize_(size)
        for device, host in self._pairs():
            device.copy_(host, non_blocking=True)
        self._settle()
        self._parked = []

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields pieces of the parked memory, each with its place in a buffer, as bytes."""
        at = 0
        for storage, _ in self._parked:
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            while len(whole):
                number, begin = divmod(at, CHUNK_BYTES)
                if number == len(self._buffers):
                    self._buffers.append(new_buffer(self._device))
                host = self._buffers[number][begin : begin + len(whole)]
                yield whole[: len(host)], host
                whole, at = whole[len(host) :], at + len(host)

    def _settle(self) -> None:
        """Waits for copies: other streams may be the next to use either side."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class Parks:
    """Base of a backend whose data on the device may be away, between ``offload`` and ``reload``. A copy brings it back while it
    is made.
    """

    device: torch.device
    _parking: Parking

    def _held(self) -> Iterable[Tensor]:
        """Returns what ``offload`` moves, after giving up what passes have left."""
        raise NotImplementedError

    def offload(self) -> None:
        """Moves what this process holds of the role to CPU memory until ``reload``, except what is there already."""
        if not self._stays and not self._parking:
            self._parking.park(self._held())

    def reload(self) -> None:
        self._parking.bring_back()

    @property
    def _stays(self) -> bool:
        return self.device.type == "cpu"

    @contextlib.contextmanager
    def _here(self) -> Iterator[None]:
        """Brings back what is away, inside the block."""
        away = bool(self._parking)
        self.reload()
        try:
            yield
        finally:
            if away:
                self.offload()

    def _refuse_away(self) -> None:
        if self._parking:
            raise RunError("the role is away from its device: call reload() before it computes")


def new_buffer(device: torch.device) -> Tensor:
    """Returns host memory of ``CHUNK_BYTES`` that this device copies to."""
    return torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")


def distinct(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Returns the storages of these tensors by their addresses, each once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage for storage in storages}


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested dicts, lists, tuples and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(type(value), "__dataclass_fields__"):
        yield from tensors_in(vars(value))
