"""The plan of a transfer: which rank of the trainer sends to which process of an engine, and how. It looks at places alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Rest = Literal["gloo", "host"]


@dataclass(frozen=True, slots=True)
class Place:
    """Location of one process's computation."""

    machine: str
    device: str
    """Type of its device, as in ``torch.device.type``."""
    gpu: str | None = None
    """Identity of its GPU, the same in every process."""
    sends: bool = True
    """The process has all weights while a bucket is gathered. Otherwise only rank 0 has them."""


@dataclass(frozen=True, slots=True)
class Route:
    """One rank and the engine processes that it sends to."""

    kind: Literal["ipc", "nccl", "gloo", "host"]
    """``ipc``: memory of the rank's own device, mapped by processes on that device. ``host``: the same in main memory. ``nccl``
    and ``gloo``: a process group, in which the rank comes first.
    """
    sender: int
    receivers: tuple[int, ...]
    """Numbers of engine processes, counted over all engines."""
    share: int = 0
    shares: int = 1
    """It carries the buckets whose number leaves the remainder ``share`` when divided by ``shares``."""
    reason: str = ""
    """Why no faster way is possible."""

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, value: Mapping[str, Any]) -> Route:
        return cls(**{**value, "receivers": tuple(value["receivers"])})


def plan_transfers(trainer: Sequence[Place], engines: Sequence[Place], rest: Rest = "gloo") -> tuple[Route, ...]:
    """Returns the routes by which every engine process gets every bucket once.

    A process on a sending rank's GPU reads that rank's memory. Processes on GPUs of their own get buckets by NCCL, from every
    GPU of rank 0's machine in turn, because each has a port of its own. What neither can do goes through main memory from rank 0.

    Args:
        trainer: places of the ranks, in order.
        engines: places of the engines' processes, in order.
        rest: the way through main memory.
    """
    owners: dict[tuple[str, str], int] = {}
    for rank, place in enumerate(trainer):
        if place.gpu is not None and (place.sends or rank == 0):
            owners.setdefault((place.machine, place.gpu), rank)
    pairs: dict[int, list[int]] = {}
    apart: list[int] = []
    for number, place in enumerate(engines):
        if place.gpu is not None and (place.machine, place.gpu) in owners:
            pairs.setdefault(owners[place.machine, place.gpu], []).append(number)
        else:
            apart.append(number)
    routes = [Route("ipc", rank, tuple(numbers)) for rank, numbers in sorted(pairs.items())]
    reasons = {number: _obstacle(number, trainer, engines) for number in apart}
    grouped = tuple(number for number in apart if not reasons[number])
    senders = [rank for (machine, _), rank in sorted(owners.items(), key=lambda item: item[1]) if machine == trainer[0].machine]
    if grouped:
        routes += [Route("nccl", rank, grouped, share, len(senders)) for share, rank in enumerate(senders)]
    for reason in dict.fromkeys(filter(None, reasons.values())):
        routes.append(Route(rest, 0, tuple(number for number in apart if reasons[number] == reason), reason=reason))
    return tuple(routes)


def _obstacle(number: int, trainer: Sequence[Place], engines: Sequence[Place]) -> str:
    """Returns why a process that shares no GPU with a sending rank cannot be in an NCCL group; empty if it can."""
    place = engines[number]
    if place.gpu is None:
        return f"the engine takes weights on {place.device}"
    if trainer[0].gpu is None:
        return f"the trainer's rank 0 computes on {trainer[0].device}"
    if (place.machine, place.gpu) in {(other.machine, other.gpu) for other in trainer}:
        return "the engine is on the GPU of a rank that never has whole weights"
    if Counter((other.machine, other.gpu) for other in engines)[place.machine, place.gpu] > 1:
        return "several processes of engines are on one GPU, which NCCL refuses"
    return ""
