"""The run's way of bringing weights to engines: connect, sync, and prove that they arrived."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rlhf_host.errors import LostError, PluginError, RunError, a, blaming
from rlhf_host.protocols import NO_WEIGHTS, CountsSent, SyncTarget, WeightSource, WeightSync, WeightSyncPlugin, WeightSyncStart
from rlhf_host.records.episodes import Trajectory
from rlhf_host.weight_sync.verify import PROBES, ROUGH_TOLERANCE, RUN_TOLERANCE, probe_prompt, verified_syncs, verify_sync

log = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Probe:
    """The actor, with which engines are compared, on a runtime that is up."""

    logprobs: Callable[[Sequence[Trajectory]], Awaitable[list[list[float]]]]
    """The actor's, at the temperature of the rollouts."""
    context_length: int
    exact: bool


@dataclass(slots=True)
class _Seen:
    """Things that earlier syncs have met."""

    connected: list[Any] | None = None
    first: list[Any] | None = None
    """The engines that were there from the beginning."""
    proofs: dict[int, tuple[Any, int]] = field(default_factory=dict)
    """The number of comparisons of each engine; with the engine, so that its number stays its own."""


@dataclass(frozen=True, slots=True)
class Bring:
    """``await bring(targets, source, version)``, for every runtime the same.

    Each engine is compared with the trainer on a probe after its first syncs, as ``verify`` says. One that came later
    (because it was started again, say) and fails does not serve, and the run goes on with the others.
    """

    sync: WeightSync
    name: str
    """Name of the sync in messages."""
    verify: str | int
    tokenizer: Any
    temperature: float
    probe: Callable[[], Probe]
    """Asked after a sync, when the runtime is up."""
    _seen: _Seen = field(default_factory=_Seen)

    async def __call__(self, targets: Sequence[SyncTarget], source: WeightSource, version: int) -> None:
        """Bring the weights of ``source`` to the engines as ``version``.

        Raises:
            RunError: the sync failed, or no engine has the trainer's weights.
        """
        engines = [target.engine for target in targets]
        if engines != self._seen.connected:
            self._seen.connected = None
            await self._do("connect", self.sync.connect(targets))
            self._seen.connected = engines
        await self._do("send", self.sync.send(source, version))
        if self._seen.first is None:
            self._seen.first = engines
        await self._prove(targets, version)

    async def sent(self, source: WeightSource) -> tuple[int, float]:
        """Returns bytes and seconds of sending since the last call; zeros for a sync that does not count them."""
        if not isinstance(self.sync, CountsSent):
            return 0, 0.0
        return await self._do("sent", self.sync.sent(source))

    async def close(self) -> None:
        """Release what the sync holds. May be called at any time, and more than once."""
        await self._do("close", self.sync.close())

    async def _do(self, what: str, work: Awaitable[Result]) -> Result:
        with blaming(self.name, what):
            return await work

    async def _prove(self, targets: Sequence[SyncTarget], version: int) -> None:
        due = [target for target in targets if not target.mixed and self._is_due(target, version)]
        first = [target for target in due if not self._is_late(target)]
        if first:  # together: on shared devices each comparison makes engines and trainer change places
            await self._compare(first, version)
            for target in first:
                self._count(target)
        failed: dict[str, RunError] = {}
        for target in due:
            if not self._is_late(target):
                continue
            try:
                gap = await self._compare([target] * PROBES, version)
            except LostError:
                raise
            except RunError as error:
                failed[target.name] = error
                target.engine.version = NO_WEIGHTS  # whatever it says of itself
                continue
            if self._count(target) == 1:
                proof = "log-probabilities of a probe within %.1g of the trainer's"
                log.warning(f"engine %s has the weights of version %d ({proof})", target.name, version, gap)
        if targets and all(target.engine.version != version for target in targets):
            raise next(
                iter(failed.values()), RunError(f"no engine says that it has the weights of version {version}: see the sync")
            )
        for name, problem in failed.items():
            log.error("engine %s is up again, but cannot serve: %s", name, problem)

    async def _compare(self, targets: Sequence[SyncTarget], version: int) -> float:
        probe = self.probe()
        prompt = probe_prompt(self.tokenizer, probe.context_length)
        tolerance = RUN_TOLERANCE if probe.exact else ROUGH_TOLERANCE
        return await verify_sync(targets, probe.logprobs, version, prompt, temperature=self.temperature, tolerance=tolerance)

    def _is_late(self, target: SyncTarget) -> bool:
        return all(target.engine is not first for first in self._seen.first or ())

    def _is_due(self, target: SyncTarget, version: int) -> bool:
        _, proofs = self._seen.proofs.get(id(target.engine), (target.engine, 0))
        return proofs < verified_syncs(self.verify, moved=not target.in_place) and target.engine.version == version

    def _count(self, target: SyncTarget) -> int:
        """Returns the number of comparisons of the engine, with one more."""
        _, proofs = self._seen.proofs.get(id(target.engine), (target.engine, 0))
        self._seen.proofs[id(target.engine)] = target.engine, proofs + 1
        return proofs + 1


def start_sync(plugin: WeightSyncPlugin, name: str, start: WeightSyncStart) -> WeightSync:
    """Starts a weight sync. Raises ``PluginError`` for one that lacks what ``WeightSync`` has."""
    with blaming(name, "start"):
        sync = plugin.start(start)
    for method in ("connect", "send", "close"):
        found = getattr(sync, method, None)
        if not callable(found):
            given = type(sync).__name__
            raise PluginError(f"{name}: start returned {a(given)} without {method}: see rlhf_host.protocols.WeightSync")
        if not inspect.iscoroutinefunction(found):
            raise PluginError(f"{name}: {method} is awaited: write async def {method}")
    return sync
