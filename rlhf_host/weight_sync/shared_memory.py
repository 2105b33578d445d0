"""Both ends of ``ipc``: buckets laid out in memory that the engines map."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rlhf_host.errors import RunError, UserError
from rlhf_host.protocols import Loader, Weights
from rlhf_host.weight_sync.buckets import Bucket, BucketLayout, dtype_of, gathered, renamed
from rlhf_host.weight_sync.rendezvous import LINK, Board, Link, join_store, leaving_on_failure

SLOTS = 2
"""Number of buffers: the trainer packs one bucket while the engines load the other."""


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


class Sender(Link):
    """The trainer's side: a board that tells where data is, and the memory."""

    def __init__(self, board: Board, cuda: bool, receivers: int, device: torch.device):
        super().__init__(board)
        self.cuda, self.receivers, self.device = cuda, receivers, device
        self._memory: dict[int, HostMemory | DeviceMemory] = {}

    def memory(self, slot: int, size: int) -> HostMemory | DeviceMemory:
        """Returns memory of at least ``size`` bytes. The old memory stays mapped wherever it is in use."""
        memory = self._memory.get(slot)
        if memory is None or memory.tensor.numel() < size:
            memory = DeviceMemory(size, self.receivers, self.device) if self.cuda else HostMemory(max(1, size), self.receivers)
            self._memory[slot] = memory
        return memory


class Receiver(Link):
    """An engine process's side."""

    def __init__(self, board: Board, cuda: bool, rank: int, device: torch.device):
        super().__init__(board)
        self.cuda, self.rank, self.device = cuda, rank, device
        self._mapped: dict[int, tuple[Any, Tensor]] = {}

    def memory(self, slot: int, ticket: Any) -> Tensor:
        known = self._mapped.get(slot)
        if known is None or known[0] != ticket:
            try:
                self._mapped[slot] = known = (ticket, (DeviceMemory if self.cuda else HostMemory).open(ticket))
            except RunError:
                self.board.raise_failure()  # a trainer that has stopped has given its memory back
                raise
        return known[1]


def join_sender(weights: Weights, cuda: bool, receivers: int, timeout_s: float) -> None:
    if weights.rank == 0:
        store, _ = weights.state[LINK]
        weights.state[LINK] = Sender(Board(store, timeout_s), cuda, receivers, weights.device)


def join_receiver(loader: Loader, host: str, port: int, first: int, cuda: bool, receivers: int, timeout_s: float) -> None:
    board = Board(join_store(host, port, timeout_s), timeout_s)
    loader.state[LINK] = Receiver(board, cuda, first + loader.rank, loader.device)


def send(weights: Weights, number: int, bucket_bytes: int, dtype: str | None, rename: Mapping[str, str]) -> None:
    """Lays out all weights once."""
    kind = None if dtype is None else dtype_of(dtype)
    with gathered(weights, bucket_bytes, kind) as buckets, leaving_on_failure(weights.state, "the trainer"):
        if weights.rank == 0:
            _send(weights.state[LINK], number, renamed(buckets, rename), kind)


def _send(sender: Sender, number: int, buckets: Iterator[Bucket], dtype: torch.dtype | None) -> None:
    board, count = sender.board, 0
    for bucket in buckets:
        layout = BucketLayout.of(bucket, dtype)
        if count >= SLOTS:
            _await_readers(sender, number, count - SLOTS)
        memory = sender.memory(count % SLOTS, layout.bytes)
        layout.pack(bucket, memory.tensor)
        if sender.cuda:
            torch.cuda.synchronize(sender.device)
        board.put(f"bucket/{number}/{count}", {"tickets": memory.tickets, "layout": layout.to_plain()})
        count += 1
    board.put(f"end/{number}", count)
    for index in range(max(0, count - SLOTS), count):
        _await_readers(sender, number, index)


def _await_readers(sender: Sender, number: int, index: int) -> None:
    read = [f"read/{number}/{index}/{rank}" for rank in range(sender.receivers)]
    for key in read:
        sender.board.wait(key)
    sender.board.forget(f"bucket/{number}/{index}", *read)


def receive(loader: Loader, number: int, version: int) -> None:
    """Loads the weights that are laid out."""
    receiver = loader.state.get(LINK)
    if not isinstance(receiver, Receiver):
        raise RunError("it is not connected: it was restarted, and must be connected again")
    with leaving_on_failure(loader.state, f"engine {loader.engine}"):
        loader.load(_arriving(receiver, number), version)


def _arriving(receiver: Receiver, number: int) -> Iterator[Bucket]:
    board, count = receiver.board, 0
    while True:
        key = board.wait(f"bucket/{number}/{count}", f"end/{number}")
        if key.startswith("end") and board.read(key) == count:
            return
        bucket = board.read(f"bucket/{number}/{count}")
        memory = receiver.memory(count % SLOTS, bucket["tickets"][receiver.rank])
        yield BucketLayout.from_plain(bucket["layout"]).views(memory)
        if receiver.cuda:
            torch.cuda.synchronize(receiver.device)
        board.put(f"read/{number}/{count}/{receiver.rank}", True)
        count += 1
