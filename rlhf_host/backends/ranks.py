"""Ranks: the data-parallel processes that train one group of roles together."""

from __future__ import annotations

import datetime
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 2**26
"""Gradients are summed in flat pieces of about this size."""


class Ranks:
    """One process alone unless ``join``ed; every method is collective: all ranks call it, in the same order."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None):
        self.rank, self.size, self._group = rank, size, group

    @classmethod
    def join(cls, rank: int, size: int, address: str, port: int, *, backend: str = "gloo", timeout_s: float = 1800.0) -> Ranks:
        """Meet the others at ``address:port``, where rank 0 listens. The group is torch's default one."""
        if size == 1:
            return cls()
        timeout = datetime.timedelta(seconds=timeout_s)
        # Left to itself the store listens on all interfaces.
        listener = socket.create_server((address, port)).detach() if rank == 0 else None
        store = dist.TCPStore(address, port, size, rank == 0, timeout, master_listen_fd=listener)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        return cls(rank, size, dist.group.WORLD)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def any(self, flag: bool) -> bool:
        return any(self.gather(bool(flag)))

    def largest(self, value: int) -> int:
        return max(self.gather(value))

    def sum_(self, tensors: list[Tensor]) -> None:
        """Replace each tensor by its sum over ranks."""
        if self.size == 1:
            return
        bucket: list[Tensor] = []
        held = 0
        for tensor in tensors:
            bucket.append(tensor)
            held += tensor.numel() * tensor.element_size()
            if held >= BUCKET_BYTES:
                self._sum(bucket)
                bucket, held = [], 0
        if bucket:
            self._sum(bucket)

    def _sum(self, bucket: list[Tensor]) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(flat, group=self._group)
        begin = 0
        for tensor in bucket:
            tensor.copy_(flat[begin : begin + tensor.numel()].view_as(tensor))
            begin += tensor.numel()
