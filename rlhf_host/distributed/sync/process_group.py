"""Routes through a process group of one trainer rank and engine processes, beside the trainer's own groups."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo

from rlhf_host.distributed.sync.buckets import SLOTS, BucketLayout
from rlhf_host.distributed.sync.remote import OtherEndGone
from rlhf_host.distributed.sync.rendezvous import Board
from rlhf_host.errors import RunError
from rlhf_host.protocols import Bucket

ABORT_S = 5.0
"""Seconds that the end of a group may take; after that it goes on by itself."""
LOOK_S = 0.05
"""Seconds between looks for a failure of another end, which a group does not notice by itself if that end hangs."""


class SyncGroup:
    """One process's membership in a group; number 0 sends. Names, shapes and dtypes are known to all after the first sync."""

    def __init__(self, board: Board, number: int, size: int, address: str, backend: str, device: torch.device):
        self.board = board
        self.device = device if backend == "nccl" else torch.device("cpu")
        self.layouts: list[BucketLayout] = []
        self.complete = False
        self._buffers: dict[int, Tensor] = {}
        self._under_way: dict[int, Any] = {}
        """Slot → the broadcast that uses its buffer."""
        # Made directly, because the default group may be another library's, and belongs to the trainer's ranks alone.
        self._group: Any = _process_group(board, number, size, address, backend, device)

    def leave(self) -> None:
        """Breaks the group off. Otherwise processes that wait in a broadcast, here or elsewhere, would wait until the deadline.

        A communicator that hangs would also hang in its destructor: only ``abort`` ends it, and in a thread, so that this
        process goes on whatever happens to it.
        """
        group, self._group = self._group, None
        if group is not None:
            thread = threading.Thread(target=group.abort, name="rlhf-abort", daemon=True)
            thread.start()
            thread.join(ABORT_S)

    def buffer(self, slot: int, layout: BucketLayout) -> Tensor:
        if slot not in self._buffers or self._buffers[slot].numel() < layout.bytes:
            self._buffers[slot] = torch.empty(layout.bytes, dtype=torch.uint8, device=self.device)
        return self._buffers[slot][: layout.bytes]

    def begin(self, slot: int, buffer: Tensor) -> None:
        """Starts the broadcast of a slot's buffer."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            self._under_way[slot] = self._group.broadcast([buffer], options)
        except RuntimeError as error:
            raise OtherEndGone(_first_sentence(error)) from error

    def finish(self, slot: int) -> None:
        """Waits until a slot's broadcast is done, if there is one.

        Raises:
            OtherEndGone: another end is gone, or says that it failed.
        """
        work = self._under_way.get(slot)
        if work is None:
            return
        pause, look = 2e-5, time.monotonic() + LOOK_S
        deadline = time.monotonic() + self.board.timeout_s
        try:
            # Polled: with NCCL ``wait`` returns at once, and the error comes somewhere else; with both it ends only by itself.
            while not work.is_completed():
                if time.monotonic() > look:
                    self.board.raise_failure()
                    look = time.monotonic() + LOOK_S
                if time.monotonic() > deadline:
                    raise RunError(f"a bucket was not through after {self.board.timeout_s:g} s")
                time.sleep(pause)
                pause = min(2 * pause, 2e-3)
            work.wait()
        except RuntimeError as error:
            raise OtherEndGone(_first_sentence(error)) from error
        del self._under_way[slot]


class GroupSender(SyncGroup):
    """The trainer's side. While a bucket is sent, the next is gathered and packed."""

    _count = 0

    def put(self, number: int, layout: BucketLayout, bucket: Bucket) -> None:
        count, slot = self._count, self._count % SLOTS
        if not self.complete:
            self.layouts.append(layout)
            self.board.put(f"layout/{count}", layout.to_plain())
        elif count >= len(self.layouts) or layout != self.layouts[count]:
            raise RunError("names, shapes or dtypes of the weights are not those of the first sync")
        self.finish(slot)
        buffer = self.buffer(slot, layout)
        layout.pack(bucket, buffer)
        self.begin(slot, buffer)
        self._count += 1

    def end(self, number: int) -> None:
        count, self._count = self._count, 0
        for slot in range(SLOTS):
            self.finish(slot)
        if not self.complete:
            self.board.put("layouts", count)
            self.complete = True
        elif count != len(self.layouts):
            raise RunError("fewer weights than at the first sync")


class GroupReceiver(SyncGroup):
    """An engine process's side. While a bucket is loaded, the next is received, once its layout is known."""

    def arriving(self, number: int) -> Iterator[Bucket]:
        count = 0
        while self._await_layout(count):
            self._expect(count)
            if self.complete and count + 1 < len(self.layouts):
                self._expect(count + 1)
            self.finish(count % SLOTS)
            layout = self.layouts[count]
            yield layout.views(self.buffer(count % SLOTS, layout))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            count += 1

    def _expect(self, count: int) -> None:
        slot = count % SLOTS
        if slot not in self._under_way:
            self.begin(slot, self.buffer(slot, self.layouts[count]))

    def _await_layout(self, count: int) -> bool:
        """Returns False if there are no more than ``count`` buckets."""
        if not self.complete:
            key = self.board.wait(f"layout/{count}", "layouts")
            if key == "layouts" and self.board.read(key) == count:
                self.complete = True
            else:
                self.layouts.append(BucketLayout.from_plain(self.board.read(f"layout/{count}")))
        return count < len(self.layouts)


def _process_group(board: Board, number: int, size: int, address: str, backend: str, device: torch.device) -> Any:
    store, timeout = PrefixStore("group", PrefixStore(board.prefix, board.store)), timedelta(seconds=board.timeout_s)
    if backend == "gloo":
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timeout
        return ProcessGroupGloo(store, number, size, options)
    if device.type != "cuda":
        raise RunError("backend nccl needs trainer and engines on GPUs: set --sync.backend gloo")
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    with torch.cuda.device(device), _without_watchdog():
        return ProcessGroupNCCL(store, number, size, options)


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Makes NCCL groups of the block leave failures to ``SyncGroup.finish``: by default torch ends the process of a group that
    fails. A group reads these variables when it is made.
    """
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "0"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _first_sentence(error: RuntimeError) -> str:
    return str(error).split(". ")[0]
