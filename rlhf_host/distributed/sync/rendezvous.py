"""Meeting of trainer and engines: a small key-value store on the trainer's machine, and the location of each process."""

from __future__ import annotations

import contextlib
import gc
import json
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from rlhf_host.distributed.sync.remote import OtherEndGone
from rlhf_host.errors import RunError


def describe(end: Any) -> dict[str, Any]:
    """Returns the arguments of ``Place``, and ``kept`` of an engine's loader. Runs at either end (``Weights`` or ``Loader``)."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"
    gpu = str(torch.cuda.get_device_properties(end.device).uuid) if end.device.type == "cuda" else None
    place = {"machine": machine, "device": end.device.type, "gpu": gpu, "sends": getattr(end, "everywhere", False)}
    return {"place": place, "kept": getattr(end, "weight_types", None)}


STOP_S = 3.0
FAILED = "failed"
LINK = "weight_sync"
"""Key in ``state`` under which both ends keep their connection; one at a time."""


def listen(weights: Any, address: str | None, timeout_s: float) -> tuple[str, int] | None:
    """Opens the meeting place on rank 0 of the trainer, and returns its address."""
    if weights.rank:
        return None
    host = address or outward_address("192.0.2.1")
    # Left to itself the store listens on all interfaces.
    listener = socket.create_server((host, 0), family=socket.AF_INET, backlog=128)
    port, timeout = listener.getsockname()[1], timedelta(seconds=timeout_s)
    store = TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())
    weights.state[LINK] = (store, host)
    return host, port


def leave(end: Any) -> None:
    """Ends the connection of either end, and frees its resources."""
    link = end.state.pop(LINK, None)
    if isinstance(link, Link):
        link.leave()
    del link
    gc.collect()


@contextlib.contextmanager
def leaving_on_failure(state: dict[str, Any], who: str) -> Iterator[None]:
    """Reports a failure here to those who poll, and ends the connection."""
    try:
        yield
    except BaseException as error:
        link = state.pop(LINK, None)
        if isinstance(link, Link):
            link.board.fail(who, error)
            link.leave()
        raise


def join_store(host: str, port: int, timeout_s: float) -> TCPStore:
    return TCPStore(host, port, None, False, timedelta(seconds=timeout_s))


def outward_address(to: str) -> str:
    """Returns the address under which this machine is seen by ``to``. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((to, 9))
        except OSError:
            return socket.gethostbyname(socket.gethostname())
        return str(probe.getsockname()[0])


def stop_waiting(host: str, port: int) -> None:
    """Wakes everyone who still waits at a meeting place."""
    with contextlib.suppress(OSError, RuntimeError):  # nobody is there any more
        socket.create_connection((host, port), timeout=STOP_S).close()  # a store would try for long, and loudly
        Board(join_store(host, port, STOP_S), STOP_S).fail("the controller", RunError("the sync was given up"))


class Board:
    """Messages between the two ends of one connection, as JSON under keys. A failure is a message too, and is raised where it
    is awaited.
    """

    def __init__(self, store: TCPStore, timeout_s: float, prefix: str = ""):
        self.store, self.timeout_s, self.prefix = store, timeout_s, prefix

    def part(self, name: str) -> Board:
        """Returns a board for messages under names of their own; failures are common to all parts."""
        return Board(self.store, self.timeout_s, f"{name}/")

    def put(self, key: str, value: Any) -> None:
        self.store.set(self.prefix + key, json.dumps(value))

    def read(self, key: str) -> Any:
        return json.loads(self.store.get(self.prefix + key))

    def fail(self, who: str, error: BaseException) -> None:
        """Reports a failure to those who wait, if anybody can still read it."""
        with contextlib.suppress(RuntimeError):
            self.store.set(FAILED, f"{who}: {error}")

    def wait(self, *keys: str) -> str:
        """Waits for the first of ``keys`` that exists, and returns it.

        Raises:
            OtherEndGone: another end failed.
            RunError: after the deadline.
        """
        # Polled, because a store's own wait can neither be interrupted by another key nor time out without a warning.
        deadline, pause = time.monotonic() + self.timeout_s, 5e-5
        while True:
            for key in keys:
                if self._has(self.prefix + key):
                    return key
            self.raise_failure()
            if time.monotonic() > deadline:
                raise RunError(f"nothing came within {self.timeout_s:g} s")
            time.sleep(pause)
            pause = min(2 * pause, 5e-3)

    def raise_failure(self) -> None:
        """Raises ``OtherEndGone`` if another end failed."""
        if self._has(FAILED):
            raise OtherEndGone(f"stopped, because another did ({self.store.get(FAILED).decode()})")

    def forget(self, *keys: str) -> None:
        for key in keys:
            self.store.delete_key(self.prefix + key)

    def _has(self, key: str) -> bool:
        try:
            return bool(self.store.check([key]))
        except RuntimeError as error:
            raise OtherEndGone("stopped, because the trainer's rank 0 did") from error


class Link:
    """One end of a connection."""

    def __init__(self, board: Board):
        self.board = board

    def leave(self) -> None:
        """Frees resources that would keep the others waiting."""
