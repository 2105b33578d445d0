"""The two ends of a weight sync. Functions named by import path run beside the weights, at the trainer and at every engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from rlhf_host.protocols.common import Buckets
from rlhf_host.protocols.engines import SyncEnd

if TYPE_CHECKING:
    import torch


class Weights(Protocol):
    """The trainer's end: the first argument of a function that ``WeightSource.run`` calls."""

    rank: int
    size: int
    device: torch.device
    state: dict[str, Any]
    """Storage for such functions between calls."""

    def buckets(self, bucket_bytes: int) -> Buckets:
        """Yield all weights, under every name of the state dict, about ``bucket_bytes`` at a time.

        Every rank must iterate to the end. Rank 0 gets the data; the values on other ranks are not used. Order, names and
        shapes are the same every time.
        """


class Loader(Protocol):
    """The engine's end: the first argument of a function that ``SyncEnd.run`` calls."""

    engine: str
    """Name of the engine, for messages."""
    rank: int
    """Number of this process among the ``size`` that hold the engine's weights."""
    size: int
    device: torch.device
    state: dict[str, Any]
    """Storage for such functions between calls."""

    def load(self, buckets: Buckets, version: int) -> None:
        """Replace all weights, then set ``version``. Waits until nothing is being generated, and clears cached prompts.

        Meanwhile the engine has version -1 and refuses to generate. If this raises, that remains so, because the weights may be a
        mixture.
        """


class WeightSource(Protocol):
    """The trainer as sync plugins see it."""

    async def run(self, function: str, **arguments: Any) -> list[Any]:
        """Call ``"package.module:function"(weights, **arguments)`` on all ranks of the actor at once; return results by rank."""


@dataclass(frozen=True, slots=True)
class SyncTarget:
    """One engine as ``sync_connect`` sees it."""

    name: str
    engine: SyncEnd
    in_place: bool = False
    """True if it samples from the trainer's own parameters, so no weights have to be sent."""


Bring: TypeAlias = "Callable[[Sequence[SyncTarget], WeightSource, int], Awaitable[None]]"
"""``await bring(targets, source, version)`` sends weights to engines and checks that they arrived."""
