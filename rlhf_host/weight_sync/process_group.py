"""Both ends of ``broadcast``: a process group for the syncs, beside the trainer's own groups."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from rlhf_host.errors import RunError
from rlhf_host.protocols import Loader, Weights
from rlhf_host.weight_sync.buckets import Bucket, BucketLayout, dtype_of, gathered, renamed
from rlhf_host.weight_sync.remote_sync import OtherEndGone
from rlhf_host.weight_sync.rendezvous import LINK, Board, Link, join_store, leaving_on_failure, outward_address


class SyncGroup(Link):
    """One process's membership in the group; rank 0 sends. Its names, shapes and dtypes are known to all after the first sync."""

    def __init__(
        self, store: TCPStore, rank: int, size: int, address: str, backend: str, device: torch.device, timeout_s: float
    ):
        super().__init__(Board(store, timeout_s))
        self.rank, self.backend = rank, backend
        self.device = device if backend == "nccl" else torch.device("cpu")
        self.layouts: list[BucketLayout] = []
        self.complete = False
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self.device)
        # Made directly, because the default group may be another library's, and belongs to the trainer's ranks alone.
        self._group = _process_group(PrefixStore("group", store), rank, size, address, backend, device, timeout_s)

    def leave(self) -> None:
        """Leaves the group. Otherwise processes that wait in a broadcast would wait until the deadline."""
        del self._group
        gc.collect()

    def on_device(self) -> Any:
        """Selects the GPU. NCCL uses the thread's current GPU, and threads begin on the first."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def buffer(self, layout: BucketLayout) -> Tensor:
        if self._buffer.numel() < layout.bytes:
            self._buffer = torch.empty(layout.bytes, dtype=torch.uint8, device=self.device)
        return self._buffer[: layout.bytes]

    def broadcast(self, buffer: Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            self._group.broadcast([buffer], options).wait()
        except RuntimeError as error:
            raise OtherEndGone(str(error).split(". ")[0]) from error


def _process_group(
    store: PrefixStore, rank: int, size: int, address: str, backend: str, device: torch.device, timeout_s: float
) -> Any:
    if backend == "gloo":
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=timeout_s)
        return ProcessGroupGloo(store, rank, size, options)
    if device.type != "cuda":
        raise RunError("backend nccl needs trainer and engines on GPUs: set --sync.backend gloo")
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    with torch.cuda.device(device):
        return ProcessGroupNCCL(store, rank, size, options)


def join_sender(weights: Weights, size: int, backend: str, timeout_s: float) -> None:
    if weights.rank == 0:
        store, host = weights.state[LINK]
        weights.state[LINK] = SyncGroup(store, 0, size, host, backend, weights.device, timeout_s)


def join_receiver(loader: Loader, host: str, port: int, first: int, size: int, backend: str, timeout_s: float) -> None:
    store, rank, address = join_store(host, port, timeout_s), 1 + first + loader.rank, outward_address(host)
    loader.state[LINK] = SyncGroup(store, rank, size, address, backend, loader.device, timeout_s)


def send(weights: Weights, number: int, bucket_bytes: int, dtype: str | None, rename: Mapping[str, str]) -> None:
    """Broadcasts all weights once."""
    kind = None if dtype is None else dtype_of(dtype)
    with gathered(weights, bucket_bytes, kind) as buckets, leaving_on_failure(weights.state, "the trainer"):
        if weights.rank == 0:
            _send(weights.state[LINK], renamed(buckets, rename), kind)


def _send(group: SyncGroup, buckets: Iterator[Bucket], dtype: torch.dtype | None) -> None:
    count = 0
    with group.on_device():
        for bucket in buckets:
            layout = BucketLayout.of(bucket, dtype)
            if not group.complete:
                group.layouts.append(layout)
                group.board.put(f"layout/{count}", layout.to_plain())
            elif count >= len(group.layouts) or layout != group.layouts[count]:
                raise RunError("names, shapes or dtypes of the weights are not those of the first sync")
            buffer = group.buffer(layout)
            layout.pack(bucket, buffer)
            group.broadcast(buffer)
            count += 1
        if not group.complete:
            group.board.put("layouts", count)
            group.complete = True
        elif count != len(group.layouts):
            raise RunError("fewer weights than at the first sync")
        if group.device.type == "cuda":
            torch.cuda.synchronize()


def receive(loader: Loader, number: int, version: int) -> None:
    """Loads the weights that are broadcast."""
    group = loader.state.get(LINK)
    if not isinstance(group, SyncGroup):
        raise RunError("it is not in the group: it was restarted, and must be connected again")
    with leaving_on_failure(loader.state, f"engine {loader.engine}"), group.on_device():
        loader.load(_arriving(group), version)


def _arriving(group: SyncGroup) -> Iterator[Bucket]:
    count = 0
    while True:
        if not group.complete:
            key = group.board.wait(f"layout/{count}", "layouts")
            if key == "layouts" and group.board.read(key) == count:
                group.complete = True
            else:
                group.layouts.append(BucketLayout.from_plain(group.board.read(f"layout/{count}")))
        if group.complete and count == len(group.layouts):
            return
        layout = group.layouts[count]
        buffer = group.buffer(layout)
        group.broadcast(buffer)
        yield layout.views(buffer)
        count += 1
