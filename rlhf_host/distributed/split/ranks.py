"""Ranks: the processes that train one group of roles together, and the rows of each."""

from __future__ import annotations

import datetime
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_host.backends.one_process import OneProcess
from rlhf_host.backends.torch import BUCKET_BYTES
from rlhf_host.backends.weights import chunked
from rlhf_host.distributed.split.slices import LineSlices
from rlhf_host.protocols import Slices


class Ranks:
    """Every method is collective: all processes call it, in the same order.

    A data-parallel rank has its own rows. Mostly it is one process. If ``parts`` neighbouring processes together hold one copy
    of the model (tensor parallelism), or compute parts of each line (sequence parallelism), they are one rank, and all of them
    work on its rows.
    """

    def __init__(self, rank: int, size: int, group: Any = None, *, part: int = 0, parts: int = 1, slices: Slices | None = None):
        self.rank, self.size, self.part, self.parts, self.processes = rank, size, part, parts, size * parts
        self.process = rank * parts + part
        self.slices = slices
        """Set if the parts compute slices of lines; each then has a gradient of its own, to be summed like a rank's."""
        self._group = group

    @classmethod
    def join(
        cls,
        process: int,
        processes: int,
        address: str,
        port: int,
        *,
        parts: int = 1,
        sliced: bool = False,
        backend: str = "gloo",
        timeout_s: float = 1800.0,
    ) -> Ranks | OneProcess:
        """Connects to the others at ``address:port``, where process 0 listens. The group is torch's default one. A process alone
        connects to nothing.

        Args:
            sliced: the parts of a rank compute slices of lines.
        """
        if processes == 1:
            return OneProcess()
        timeout = datetime.timedelta(seconds=timeout_s)
        # Left to itself the store listens on all interfaces.
        listener = socket.create_server((address, port)).detach() if process == 0 else None
        store = dist.TCPStore(address, port, processes, process == 0, timeout, master_listen_fd=listener)
        dist.init_process_group(backend, store=store, rank=process, world_size=processes, timeout=timeout)
        rank, part, slices = process // parts, process % parts, None
        if sliced:
            groups = [dist.new_group([*range(first, first + parts)]) for first in range(0, processes, parts)]
            slices = LineSlices(groups[rank], part, parts)
        return cls(rank, processes // parts, dist.group.WORLD, part=part, parts=parts, slices=slices)

    def gather(self, value: Any) -> list[Any]:
        """Returns every process's value, in rank order."""
        values: list[Any] = [None] * self.processes
        dist.all_gather_object(values, value, group=self._group)
        return values

    def sum_(self, tensors: list[Tensor]) -> None:
        """Replaces each tensor by its sum over processes."""
        for bucket in chunked(tensors, lambda tensor: tensor.nbytes, BUCKET_BYTES):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            dist.all_reduce(flat, group=self._group)
            for tensor, total in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(total.view_as(tensor))
