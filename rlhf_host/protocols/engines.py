"""Engines: what generates tokens. Everything of a started engine is called on the run's event loop and must not block it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rlhf_host.protocols.common import Compute, Traits
from rlhf_host.protocols.kernels import Kernels
from rlhf_host.records.episodes import Generation, SampleKey, Sampling

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits(Traits):
    takes: Literal["module", "directory"] = "directory"
    """It samples from the trainer's own module, or from a model directory, into weights of its own."""
    waves: bool = False
    """It decodes a batch to its end before the next, so it is best given all that may come at once."""
    largest_batch: int | None = None
    """Completions it decodes at the same time; ``None``: no limit is known."""
    devices: int = 1
    """Devices that one engine takes."""
    sleeps: bool = False
    """``sleep`` gives device memory back."""
    syncs: tuple[str, ...] = ()
    """Weight syncs that work with it, the best first; empty: all."""


class Generator(Protocol):
    """What episodes ask: one engine, or a runtime's several."""

    version: int
    """Of the weights it holds; -1: none of this run, and ``generate`` refuses."""

    @property
    def busy_s(self) -> float:
        """Seconds in which something was being generated."""

    def expect(self, count: int) -> None:
        """So many requests may still come: engines that work in waves wait for them."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        """Sample one completion. Its uniforms follow from ``key`` alone; cancelling the call ends the work on it.

        Raises:
            UserError: the request cannot be served.
            RunError: there are no weights of this run, or the engine is closed.
            LostError: the engine's process is gone.
        """


class SyncEnd(Protocol):
    """What a weight sync asks of one engine."""

    version: int
    """As ``Generator.version``."""

    async def run(self, function: str, **arguments: Any) -> Any:
        """``"package.module:function"(loader, **arguments)`` in a thread of each process that holds the engine's weights.

        ``loader`` is a ``Loader``; arguments and result are plain values.
        """

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        """As ``Generator.generate``, by this very engine."""

    def set_version(self, version: int) -> None:
        """The weights now held are ``version``; what was cached under older ones is forgotten.

        Raises:
            RunError: the engine knows that it does not hold them.
        """


class Engine(Generator, SyncEnd, Protocol):
    """A started engine."""

    @property
    def context_length(self) -> int | None:
        """Longest row, prompt and completion, in tokens; ``None``: no limit of its own."""

    @property
    def exact(self) -> bool:
        """It computes in 32 bits, so its log-probabilities must equal the trainer's closely."""

    @property
    def dead(self) -> bool:
        """It will answer nothing any more, and nobody closed it."""

    async def sleep(self) -> None:
        """Give device memory back until ``wake``. Raises ``RunError`` while requests are in flight."""

    async def wake(self) -> None:
        """Undo ``sleep``."""

    async def close(self) -> None:
        """Fail pending requests with ``RunError``, end threads and processes; after any failure, any number of times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStart:
    """Given to ``EnginePlugin.start``."""

    model: nn.Module | Path
    """As ``traits.takes`` says. A directory holds configuration and tokenizer, and the weights too if ``version`` is not -1."""
    tokenizer: Any
    version: int
    compute: Compute
    kernels: Kernels


class EnginePlugin(Protocol):
    """An entry point of the group ``rlhf.engines``."""

    @property
    def traits(self) -> EngineTraits:
        """May depend on the options."""

    def start(self, start: EngineStart) -> Engine:
        """The engine, once it is up. Raises ``UserError`` when it cannot serve this model; nothing is left behind then."""
