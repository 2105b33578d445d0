"""Both ends of a weight sync: functions named by import path run beside the weights, at the trainer and at every engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from rlhf_host.protocols.common import Buckets
from rlhf_host.protocols.engines import SyncEnd

if TYPE_CHECKING:
    import torch


class Weights(Protocol):
    """The trainer's end: first argument of a function that ``WeightSource.run`` calls."""

    rank: int
    size: int
    device: torch.device
    state: dict[str, Any]
    """Whatever such functions keep from call to call."""

    def buckets(self, bucket_bytes: int) -> Buckets:
        """All weights under every name of the state dict, in about ``bucket_bytes`` at a time.

        Collective: every rank iterates to the end. Rank 0 gets the data; what others get is not looked at. The order, names and
        shapes are the same every time.
        """


class Loader(Protocol):
    """The engine's end: first argument of a function that ``SyncEnd.run`` calls."""

    engine: str
    """Which engine, for messages."""
    rank: int
    """Of this process among the ``size`` that hold the engine's weights."""
    size: int
    device: torch.device
    state: dict[str, Any]
    """Whatever such functions keep from call to call."""

    def load(self, buckets: Buckets, version: int) -> None:
        """Replace all weights, then hold ``version``. Waits until nothing is generated, and forgets cached prompts.

        Meanwhile, and ever after when this raises, the engine has version -1 and refuses to generate: its weights may be a mixture.
        """


class WeightSource(Protocol):
    """The trainer as sync plugins see it."""

    async def run(self, function: str, **arguments: Any) -> list[Any]:
        """``"package.module:function"(weights, **arguments)`` on every rank of the actor's group at once; results in rank order."""


@dataclass(frozen=True, slots=True)
class SyncTarget:
    """One engine as ``sync_connect`` sees it."""

    name: str
    engine: SyncEnd
    in_place: bool = False
    """It samples from the trainer's own parameters: nothing has to move."""


Bring: TypeAlias = "Callable[[Sequence[SyncTarget], WeightSource, int], Awaitable[None]]"
"""``await bring(targets, source, version)``: the host's own way of bringing weights to engines and of proving that they arrived."""
