"""Engines generate tokens. The members of a started engine are called on the run's event loop and must not block it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from rlhf_host.protocols.common import Compute, Traits
from rlhf_host.protocols.kernels import Kernels
from rlhf_host.records.episodes import Generation, SampleKey, Sampling
from rlhf_host.records.tensors import Metric

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits(Traits):
    takes: Literal["module", "directory"] = "directory"
    """``module``: it samples from the trainer's own module. ``directory``: it loads its own weights from a model directory."""
    waves: bool = False
    """It finishes a batch before it starts the next one, so it should get all requests at once."""
    largest_batch: int | None = None
    """Number of completions that it decodes at the same time; ``None``: no known limit."""
    devices: int = 1
    """Number of devices of one engine."""
    sleeps: bool = False
    """``sleep`` releases device memory."""
    syncs: tuple[str, ...] = ()
    """Names of the weight syncs that work with it, the best one first; empty: all."""
    in_flight: bool = False
    """New weights may come while requests are unfinished: an answer goes on under them, and says which version sampled each token.
    Requests that are made meanwhile wait."""
    adapters: bool = False
    """It can hold the base of a LoRA run and take adapters in place of weights (``EngineStart.adapter_rank``)."""


class Generator(Protocol):
    """Answers the requests of episodes: one engine, or several engines of a runtime."""

    version: int
    """Version of its weights; -1: it has no weights of this run, and ``generate`` refuses."""

    @property
    def busy_s(self) -> float:
        """Seconds spent generating so far."""

    def expect(self, count: int) -> None:
        """At most ``count`` requests can be unanswered at once from now on; this replaces the number given before. Engines that
        work in waves wait until as many have arrived, but not for long: a cancelled or failed request leaves it too high."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        """Sample one completion. Its random numbers depend only on ``key``. Cancelling the call stops the work.

        Raises:
            UserError: the request cannot be served.
            RunError: there are no weights of this run, or the engine is closed.
            LostError: the engine's process is gone.
        """


class SyncEnd(Protocol):
    """The part of one engine that a weight sync uses."""

    version: int
    """As ``Generator.version``."""

    async def run(self, function: str, **arguments: Any) -> Any:
        """Call ``"package.module:function"(loader, **arguments)`` in a thread of each process that holds the engine's weights.

        ``loader`` is a ``Loader``; arguments and result are plain values.
        """

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        """As ``Generator.generate``, by this engine."""

    def set_version(self, version: int) -> None:
        """The weights now have this version. Everything cached under older versions must be dropped.

        Raises:
            RunError: the engine knows that it does not have these weights.
        """


class Engine(Generator, SyncEnd, Protocol):
    """A started engine."""

    @property
    def context_length(self) -> int | None:
        """Longest row (prompt and completion) in tokens; ``None``: no limit."""

    @property
    def exact(self) -> bool:
        """It computes in 32 bits, so its log-probabilities must be close to the trainer's."""

    @property
    def dead(self) -> bool:
        """It can no longer answer, although nobody closed it."""

    async def sleep(self) -> None:
        """Release device memory until ``wake``. Raises ``RunError`` if requests are unfinished."""

    async def wake(self) -> None:
        """Undo ``sleep``."""

    async def close(self) -> None:
        """Fail pending requests with ``RunError``; end threads and processes. Works after any failure, and more than once."""


@runtime_checkable
class Measured(Protocol):
    """What an engine may have too."""

    async def metrics(self) -> Sequence[Metric]:
        """What happened since the last call, as single numbers; the host logs them under ``engine/``. Those of several engines are
        combined as each metric's ``reduce`` says."""


@runtime_checkable
class Counting(Protocol):
    """What an engine may have too, so that people see how far its answers are, and a run that one does not move."""

    @property
    def sampled(self) -> int:
        """Tokens sampled so far, also those of answers that are not finished. It never goes down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStart:
    """The argument of ``EnginePlugin.start``."""

    model: nn.Module | Path
    """As ``traits.takes`` says. A directory has configuration and tokenizer, and also the weights if ``version`` is not -1."""
    tokenizer: Any
    """The actor's, of transformers."""
    version: int
    """Of the weights in ``model``; -1: a sync will bring others."""
    compute: Compute
    """The thread for everything that models compute, ``kernels.decoder`` included."""
    kernels: Kernels
    """For engines that sample with modules of transformers."""
    adapter_rank: int = 0
    """Above 0: ``model`` has the weights of the base, and syncs bring an adapter of this rank: ``A`` and ``alpha / rank · B`` in
    float32, by their names in peft's files."""


class EnginePlugin(Protocol):
    """An entry point of the group ``rlhf.engines``."""

    @property
    def traits(self) -> EngineTraits:
        """May depend on the options."""

    def start(self, start: EngineStart) -> Engine:
        """Return the engine when it is ready. For a model that it cannot serve, raise ``UserError`` and leave nothing behind."""
