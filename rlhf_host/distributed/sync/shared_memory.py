"""Routes through memory: the trainer lays buckets out in memory that the engines map."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rlhf_host.distributed.sync.buckets import SLOTS, BucketLayout
from rlhf_host.distributed.sync.rendezvous import Board
from rlhf_host.errors import RunError, UserError
from rlhf_host.protocols import Bucket


class HostMemory:
    """Anonymous shared memory (a memfd): it leaves no name behind, and is not limited by the size of /dev/shm.

    Others open it through this process's entry in /proc.
    """

    def __init__(self, size: int, receivers: int):
        if not hasattr(os, "memfd_create"):
            raise UserError("ipc without GPUs needs Linux: use --sync broadcast")
        self._handle = os.memfd_create("rlhf-weights")
        # Claimed now, because a machine out of memory would otherwise kill the process at the first write.
        os.posix_fallocate(self._handle, 0, size)
        self.tensor = torch.frombuffer(mmap.mmap(self._handle, size), dtype=torch.uint8)
        status = os.fstat(self._handle)
        ticket = {"pid": os.getpid(), "handle": self._handle, "size": size, "file": [status.st_dev, status.st_ino]}
        self.tickets: list[Any] = [ticket] * receivers

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            os.close(self._handle)

    @staticmethod
    def open(ticket: Mapping[str, Any]) -> Tensor:
        try:
            handle = os.open(f"/proc/{ticket['pid']}/fd/{ticket['handle']}", os.O_RDWR)
        except OSError as error:
            raise RunError(f"the trainer's memory cannot be opened ({error.strerror}): use --sync broadcast") from error
        try:
            status = os.fstat(handle)
            if [status.st_dev, status.st_ino] != list(ticket["file"]):
                raise RunError("the trainer is not in this container: use --sync broadcast")
            return torch.frombuffer(mmap.mmap(handle, ticket["size"]), dtype=torch.uint8)
        finally:
            os.close(handle)


class DeviceMemory:
    """GPU memory that other processes map by a CUDA IPC handle. PyTorch counts the holders of a handle, so each receiver gets
    its own.
    """

    def __init__(self, size: int, receivers: int, device: torch.device):
        self.tensor = torch.empty(size, dtype=torch.uint8, device=device)
        gpu = str(torch.cuda.get_device_properties(device).uuid)
        self.tickets = [{"gpu": gpu, "size": size, "handle": self._share()} for _ in range(receivers)]

    def _share(self) -> list[Any]:
        _, *parts = self.tensor.untyped_storage()._share_cuda_()
        return [["hex", part.hex()] if isinstance(part, bytes) else ["plain", part] for part in parts]

    @staticmethod
    def open(ticket: Mapping[str, Any]) -> Tensor:
        for index in range(torch.cuda.device_count()):
            if str(torch.cuda.get_device_properties(index).uuid) == ticket["gpu"]:
                parts = [bytes.fromhex(value) if kind == "hex" else value for kind, value in ticket["handle"]]
                storage = torch.UntypedStorage._new_shared_cuda(index, *parts)
                return torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}").set_(storage)[: ticket["size"]]
        raise RunError(f"the trainer's GPU {ticket['gpu']} is not visible here: use --sync broadcast")


class SharedSender:
    """The trainer's side: memory of ``device``, and a board that tells where data is."""

    def __init__(self, board: Board, receivers: int, device: torch.device):
        self.board, self.receivers, self.device = board, receivers, device
        self._memory: dict[int, HostMemory | DeviceMemory] = {}
        self._count = 0

    def put(self, number: int, layout: BucketLayout, bucket: Bucket) -> None:
        if self._count >= SLOTS:
            self._await_readers(number, self._count - SLOTS)
        memory = self._slot_memory(self._count % SLOTS, layout.bytes)
        layout.pack(bucket, memory.tensor)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.board.put(f"bucket/{number}/{self._count}", {"tickets": memory.tickets, "layout": layout.to_plain()})
        self._count += 1

    def end(self, number: int) -> None:
        count, self._count = self._count, 0
        self.board.put(f"end/{number}", count)
        for index in range(max(0, count - SLOTS), count):
            self._await_readers(number, index)

    def leave(self) -> None:
        self._memory.clear()

    def _slot_memory(self, slot: int, size: int) -> HostMemory | DeviceMemory:
        """Returns memory of at least ``size`` bytes. The old memory stays mapped wherever it is in use."""
        memory = self._memory.get(slot)
        if memory is None or memory.tensor.numel() < size:
            on_gpu = self.device.type == "cuda"
            memory = DeviceMemory(size, self.receivers, self.device) if on_gpu else HostMemory(max(1, size), self.receivers)
            self._memory[slot] = memory
        return memory

    def _await_readers(self, number: int, index: int) -> None:
        read = [f"read/{number}/{index}/{place}" for place in range(self.receivers)]
        for key in read:
            self.board.wait(key)
        self.board.forget(f"bucket/{number}/{index}", *read)


class SharedReceiver:
    """An engine process's side. ``place`` is its number among the receivers."""

    def __init__(self, board: Board, place: int, device: torch.device):
        self.board, self.place, self.device = board, place, device
        self._mapped: dict[int, tuple[Any, Tensor]] = {}

    def arriving(self, number: int) -> Iterator[Bucket]:
        board, count = self.board, 0
        while True:
            key = board.wait(f"bucket/{number}/{count}", f"end/{number}")
            if key.startswith("end") and board.read(key) == count:
                return
            bucket = board.read(f"bucket/{number}/{count}")
            memory = self._map(count % SLOTS, bucket["tickets"][self.place])
            yield BucketLayout.from_plain(bucket["layout"]).views(memory)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            board.put(f"read/{number}/{count}/{self.place}", True)
            count += 1

    def leave(self) -> None:
        self._mapped.clear()

    def _map(self, slot: int, ticket: Any) -> Tensor:
        known = self._mapped.get(slot)
        if known is None or known[0] != ticket:
            try:
                self._mapped[slot] = known = (ticket, (DeviceMemory if "gpu" in ticket else HostMemory).open(ticket))
            except RunError:
                self.board.raise_failure()  # a trainer that has stopped has given its memory back
                raise
        return known[1]
