"""Both ends of ``ipc`` and ``broadcast``: buckets over the routes of a plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch

from rlhf_host.distributed.sync.buckets import BucketLayout, Wire, gathered
from rlhf_host.distributed.sync.process_group import GroupReceiver, GroupSender
from rlhf_host.distributed.sync.rendezvous import LINK, Board, Link, join_store, leaving_on_failure, outward_address
from rlhf_host.distributed.sync.shared_memory import SharedReceiver, SharedSender
from rlhf_host.distributed.sync.transfer_plan import Route
from rlhf_host.errors import RunError
from rlhf_host.protocols import Bucket, Buckets, Loader, Weights


class Sender(Protocol):
    """The trainer's end of one route."""

    def put(self, number: int, layout: BucketLayout, bucket: Bucket) -> None:
        """Send one bucket of sync ``number``; its tensors may change once this returns."""

    def end(self, number: int) -> None:
        """Wait until all buckets of sync ``number`` have been read."""

    def leave(self) -> None:
        """Free what would keep the others waiting."""


class Receiver(Protocol):
    """An engine process's end of one route."""

    def arriving(self, number: int) -> Iterator[Bucket]:
        """Yield the buckets of sync ``number``; the tensors of one may change once the next is asked for."""

    def leave(self) -> None:
        """Free what would keep the others waiting."""


class Connection(Link):
    """One process's ends of its routes."""

    def __init__(self, board: Board):
        super().__init__(board)
        self.routes: list[Route] = []
        self.ends: list[Any] = []
        """``Sender`` or ``Receiver`` of each route."""

    def leave(self) -> None:
        for end in self.ends:
            end.leave()
        self.ends.clear()


def join_sender(weights: Weights, host: str, port: int, routes: Sequence[Mapping[str, Any]], timeout_s: float) -> None:
    """Joins the routes on which this rank sends."""
    numbered = [(number, Route.from_plain(route)) for number, route in enumerate(routes)]
    own = [(number, route) for number, route in numbered if route.sender == weights.rank]
    if weights.rank == 0:
        store, address = weights.state[LINK]
    elif own:
        store, address = join_store(host, port, timeout_s), outward_address(host)
    else:
        return
    weights.state[LINK] = connection = Connection(Board(store, timeout_s))
    with leaving_on_failure(weights.state, _rank(weights)):
        for number, route in own:
            board, count = connection.board.part(f"route-{number}"), len(route.receivers)
            sender: Sender
            if route.kind in ("ipc", "host"):
                device = weights.device if route.kind == "ipc" else torch.device("cpu")
                sender = SharedSender(board, count, device)
            else:
                sender = GroupSender(board, 0, 1 + count, address, route.kind, weights.device)
            connection.routes.append(route)
            connection.ends.append(sender)


def join_receiver(
    loader: Loader, host: str, port: int, first: int, routes: Sequence[Mapping[str, Any]], timeout_s: float
) -> None:
    """Joins the routes by which this process gets buckets.

    Args:
        first: number of the engine's first process among those of all engines.
    """
    own, board = first + loader.rank, Board(join_store(host, port, timeout_s), timeout_s)
    loader.state[LINK] = connection = Connection(board)
    with leaving_on_failure(loader.state, f"engine {loader.engine}"):
        for number, route in enumerate(map(Route.from_plain, routes)):
            if own not in route.receivers:
                continue
            part, place = board.part(f"route-{number}"), route.receivers.index(own)
            receiver: Receiver
            if route.kind in ("ipc", "host"):
                receiver = SharedReceiver(part, place, loader.device)
            else:
                address, size = outward_address(host), 1 + len(route.receivers)
                receiver = GroupReceiver(part, 1 + place, size, address, route.kind, loader.device)
            connection.routes.append(route)
            connection.ends.append(receiver)


def send(
    weights: Weights, number: int, bucket_bytes: int, wire: Mapping[str, Any], rename: Mapping[str, str], everywhere: bool
) -> None:
    """Sends all weights once, over the routes of this rank."""
    types, connection = Wire.from_plain(wire), weights.state.get(LINK)
    with (
        gathered(weights, bucket_bytes, types, rename, everywhere=everywhere) as buckets,
        leaving_on_failure(weights.state, _rank(weights)),
    ):
        if isinstance(connection, Connection):
            with _on(weights.device):
                _send(connection, number, buckets, types)


def _send(connection: Connection, number: int, buckets: Buckets, types: Wire) -> None:
    ends = list(zip(connection.routes, connection.ends, strict=True))
    for count, bucket in enumerate(buckets):
        mine = [end for route, end in ends if count % route.shares == route.share]
        layout = BucketLayout.of(bucket, types) if mine else None
        for end in mine:
            end.put(number, layout, bucket)
    for _, end in ends:
        end.end(number)


def receive(loader: Loader, number: int, version: int) -> None:
    """Loads the weights that arrive."""
    connection = loader.state.get(LINK)
    if not isinstance(connection, Connection):
        raise RunError("it is not connected: it was restarted, and must be connected again")
    parts = sorted(zip(connection.routes, connection.ends, strict=True), key=lambda part: part[0].share)
    with leaving_on_failure(loader.state, f"engine {loader.engine}"), _on(loader.device):
        loader.load(_in_order([end.arriving(number) for _, end in parts]), version)


def _in_order(parts: list[Iterator[Bucket]]) -> Iterator[Bucket]:
    """Yields what arrives by routes that carry buckets in turn."""
    for count in itertools.count():
        bucket = next(parts[count % len(parts)], None)
        if bucket is None:
            for part in parts:
                next(part, None)  # it reads that nothing more comes
            return
        yield bucket


def _on(device: torch.device) -> Any:
    """Selects the GPU: NCCL uses the thread's current one, and threads begin on the first."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _rank(weights: Weights) -> str:
    return "the trainer" if weights.size == 1 else f"the trainer's rank {weights.rank}"
