"""Interface of engines, which generate tokens. The members of a started engine are called on the run's event loop and must not
block it.
"""

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
    """True if it finishes a batch before it starts the next one, so it should get all requests at once."""
    largest_batch: int | None = None
    """Number of completions that it decodes at the same time; ``None``: no known limit."""
    devices: int = 1
    """Number of devices of one engine."""
    sleeps: bool = False
    """True if ``sleep`` releases device memory."""
    syncs: tuple[str, ...] = ()
    """Names of the weight syncs that work with it, the best one first; empty: all."""
    in_flight: bool = False
    """True if new weights may come while requests are unfinished: an answer goes on under them, and records which version
    sampled each token. Requests that are made meanwhile wait.
    """
    adapters: bool = False
    """True if it can hold the base of a LoRA run and take adapters in place of weights (``EngineStart.adapter_rank``)."""
    images: bool = False
    """Provisional: True if it takes prompts with pictures (``records.pictures.Pictured``)."""
    support: int = 0
    """Provisional: the largest ``top_k`` with which it follows ``Sampling.support``, which training on truncated sampling needs;
    ``2**31 - 1``: it does without ``top_k``, too.
    """


class Generator(Protocol):
    """Interface for the requests of episodes: one engine, or several engines of a runtime."""

    version: int
    """Version of its weights; -1: it has no weights of this run, and ``generate`` refuses."""

    @property
    def busy_s(self) -> float:
        """Seconds spent generating so far."""

    def expect(self, count: int) -> None:
        """Announce that at most ``count`` requests can be unanswered at once from now on; this replaces the number given
        before. Engines that work in waves wait until as many have arrived, but not for long: a cancelled or failed request
        leaves it too high.
        """

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        """Sample one completion. Its random numbers depend only on ``key``. Cancelling the call stops the work. Tokens are
        ``Pictured`` if a prompt has pictures; only engines whose traits say ``images`` get such.

        Raises:
            UserError: the request cannot be served.
            RunError: there are no weights of this run, or the engine is closed.
            LostError: the engine's process is gone.
        """


@runtime_checkable
class SyncEnd(Protocol):
    """The part of one engine that a weight sync uses."""

    version: int
    """Version of its weights, as in ``Generator.version``."""

    async def run(self, function: str, **arguments: Any) -> list[Any]:
        """Call ``"package.module:function"(loader, **arguments)`` in a thread of each process that holds the engine's weights, in
        all of them at once; return results by rank. An engine of one process returns a list of one.

        ``loader`` is the process's own ``Loader``; arguments and results are plain values. The first failure is raised.
        """

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        """Sample one completion by this engine, as in ``Generator.generate``."""

    def set_version(self, version: int) -> None:
        """Set the version of the weights. Everything cached under older versions must be dropped.

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
        """True if it computes in 32 bits, so its log-probabilities must be close to the trainer's."""

    @property
    def dead(self) -> bool:
        """True if it can no longer answer, although nobody closed it."""

    async def sleep(self) -> None:
        """Release device memory until ``wake``. Raises ``RunError`` if requests are unfinished."""

    async def wake(self) -> None:
        """Undo ``sleep``."""

    async def close(self) -> None:
        """Fail pending requests with ``RunError``; end threads and processes. Works after any failure, and more than once."""


@runtime_checkable
class WakesInParts(Protocol):
    """Optional interface of an engine that sleeps without keeping its weights, where a sync brings all of them before it
    samples again, and that wakes for them first.
    """

    async def sleep_empty(self) -> None:
        """Release device memory as ``sleep`` does; weights that a sync brings are not kept, and ``version`` is -1 then."""

    async def wake_weights(self) -> None:
        """Take device memory for weights alone, so that a sync can bring them. ``wake`` takes the rest."""


@runtime_checkable
class Measured(Protocol):
    """Optional interface of an engine with metrics."""

    async def metrics(self) -> Sequence[Metric]:
        """Return the metrics since the last call, as single numbers; the host logs them under ``engine/``. Those of several
        engines are combined by each metric's ``reduce``.
        """


@runtime_checkable
class Counting(Protocol):
    """Optional interface of an engine that counts tokens, so that people see the progress of answers, and a run notices an
    engine that stalls.
    """

    @property
    def sampled(self) -> int:
        """Tokens sampled so far, including those of unfinished answers. It never decreases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStart:
    """The argument of ``EnginePlugin.start``."""

    model: nn.Module | Path
    """Model, in the form of ``traits.takes``. A directory has configuration and tokenizer, and also the weights if ``version``
    is not -1.
    """
    tokenizer: Any
    """Tokenizer of the actor, from transformers."""
    version: int
    """Version of the weights in ``model``; -1: a sync will bring others."""
    compute: Compute
    """The thread for everything that models compute, ``kernels.decoder`` included."""
    kernels: Kernels
    """Kernels, for engines that sample with modules of transformers."""
    adapter_rank: int = 0
    """Rank of adapters. Above 0: ``model`` has the weights of the base, and syncs bring an adapter of this rank: ``A`` and
    ``alpha / rank · B`` in float32, by their names in peft's files.
    """


class EnginePlugin(Protocol):
    """An entry point of the group ``rlhf.engines``."""

    @property
    def traits(self) -> EngineTraits:
        """Traits; they may depend on the options."""

    def start(self, start: EngineStart) -> Engine:
        """Return the engine when it is ready. For a model that it cannot serve, raise ``UserError`` and leave nothing behind."""
