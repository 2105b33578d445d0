"""Interface of weight syncs, and their two ends. Functions named by import path run beside the weights, at the trainer and at
every engine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from rlhf_host.protocols.common import Buckets, Traits
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
    everywhere: bool
    """True if ``buckets`` can give the data to every rank."""

    def buckets(self, bucket_bytes: int, everywhere: bool = False) -> Buckets:
        """Yield all weights, under every name of the state dict, about ``bucket_bytes`` at a time.

        Every rank must iterate to the end, with the same arguments. Rank 0 gets the data, and with ``everywhere`` every rank
        does; other values are not used. Order, names and shapes are the same every time. Tensors may be the parameters
        themselves: only read them.
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


@runtime_checkable
class WeightTypes(Protocol):
    """Optional interface of a ``Loader`` that says in which types it keeps weights, so that no more bits are sent."""

    kept: tuple[str, tuple[str, ...]] | None
    """A type, such as ``bfloat16``, and beginnings of the names of weights that may be kept in others; ``None``: unknown."""


@runtime_checkable
class WeightSource(Protocol):
    """The trainer as weight syncs see it."""

    async def run(self, function: str, **arguments: Any) -> list[Any]:
        """Call ``"package.module:function"(weights, **arguments)`` on all ranks of the actor at once; return results by rank."""


@dataclass(frozen=True, slots=True)
class SyncTarget:
    """One engine as a weight sync sees it."""

    name: str
    engine: SyncEnd
    in_place: bool = False
    """True if it samples from the trainer's own parameters, so no weights have to be sent."""
    mixed: bool = False
    """True if it samples from a mixture of these weights with others, so that its log-probabilities are not the trainer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncTraits(Traits):
    in_place: bool | None = None
    """True: only for engines that sample from the trainer's own module. False: only for engines with weights of their own."""
    rounded: bool = False
    """True if the sync itself leaves bits out, so that even an engine that keeps all of the trainer's bits gets fewer, and its
    log-probabilities differ.
    """
    bucket_bytes: int = 0
    """Bytes of weights that are on their way at once, at each end; 0: none, or unknown."""


class WeightSync(Protocol):
    """A started weight sync. Its methods are called on the run's event loop and must not block it."""

    async def connect(self, targets: Sequence[SyncTarget]) -> None:
        """Prepare the connection from the trainer to the engines, in place of earlier ones."""

    async def send(self, source: WeightSource, version: int) -> None:
        """Send the weights of ``source`` (the trainer's actor) to every connected engine. Each engine then has ``version``."""

    async def close(self) -> None:
        """Release process groups, memory and files. Works after any failure, before ``connect``, and more than once."""


@runtime_checkable
class CountsSent(Protocol):
    """Optional interface of a ``WeightSync`` that counts what it sends, for the metrics ``sync/gb`` and ``sync/gb_per_s``."""

    async def sent(self, source: WeightSource) -> tuple[int, float]:
        """Return the bytes that ``source`` sent in complete syncs since the last call, and the seconds that these took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncStart:
    """The argument of ``WeightSyncPlugin.start``."""

    run_dir: Path | None
    """Directory of the run, if it writes one."""


class WeightSyncPlugin(Protocol):
    """An entry point of the group ``rlhf.weight_sync``."""

    @property
    def traits(self) -> WeightSyncTraits:
        """Traits; they may depend on the options."""

    def start(self, start: WeightSyncStart) -> WeightSync:
        """Return the weight sync, which no engine is connected to yet."""


Bring: TypeAlias = "Callable[[Sequence[SyncTarget], WeightSource, int], Awaitable[None]]"
"""``await bring(targets, source, version)`` sends weights to engines and checks that they arrived."""
