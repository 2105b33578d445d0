"""Engines in Ray's processes, over restarts: which engines are up, and the restart of one that died."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_host.distributed.ray.actors import EngineInfo, LifeOver
from rlhf_host.distributed.ray.dispatch import Lane
from rlhf_host.distributed.ray.worker_group import plain_error
from rlhf_host.engines.requests import Request
from rlhf_host.errors import LostError, RunError
from rlhf_host.protocols import SyncTarget
from rlhf_host.records.episodes import Generation, SampleKey, Sampling

log = logging.getLogger(__name__)

State = Literal["serving", "unsynced", "down", "homeless", "gone"]
"""States: serving; up but without the run's current weights; being restarted; waiting for a machine; lost for good."""

RETRY_S = 0.5
"""Seconds between attempts to reach an engine that is being restarted."""
MOVE_S = 3.0
"""Seconds that Ray may take to find another machine for an engine before a message says so."""


class EngineLost(LostError):
    """Raised if an engine's process died during a request."""


@dataclass(eq=False, slots=True)
class Seat:
    """The place of one engine, over all of its processes."""

    name: str
    actor: Any
    start_arguments: tuple[Any, ...]
    """Arguments of ``EngineActor.start``."""
    lane: Lane
    state: State = "unsynced"
    engine: RemoteEngine | None = None
    revival: asyncio.Task[None] | None = None


class RemoteEngine:
    """One life of an engine as weight sync sees it (``SyncTarget.engine``)."""

    def __init__(self, lives: EngineLives, seat: Seat, info: EngineInfo):
        self.name, self.life, self.version, self.pid = seat.name, info.life, info.version, info.pid
        self._lives, self._seat = lives, seat

    async def run(self, function: str, **arguments: Any) -> list[Any]:
        """Runs ``"package.module:function"(loader, **arguments)`` in the engine's processes. Raises ``EngineLost``."""
        results, self.version = await self._ask(self._seat.actor.run, function, arguments)
        return results

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        """Returns one completion from exactly this engine. Raises the engine's errors, and ``EngineLost``."""
        await self._lives.awake()
        return await self._ask(self._seat.actor.generate_alone, Request.of(token_ids, sampling, key))

    def set_version(self, version: int) -> None:
        """Sets the version. Raises ``RunError`` unless the engine itself reports that it holds ``version``."""
        if self.version != version:
            raise RunError(f"engine {self.name} holds weights of version {self.version}, not {version}: they did not arrive")

    async def _ask(self, method: Any, *arguments: Any) -> Any:
        import ray

        if self._seat.engine is not self:
            raise EngineLost(f"engine {self.name} has died")
        try:
            return await method.remote(self.life, *arguments)
        except ray.exceptions.RayError as error:
            if not is_lost(error):
                raise plain_error(error, f"engine {self.name}") from error
            self._lives.report_lost(self)
            raise EngineLost(f"engine {self.name} has died") from error


class EngineLives:
    """The engines of a pool. An engine that dies is restarted and gets the current weights.

    Args:
        asleep: returns True while the engines sleep.
        awake: wakes them if they do.
        wait_s: seconds that a run without any engine waits for a machine.
        on_lost: distributes an engine's requests again; returns their number.
        on_back: brings the current weights to a restarted engine.
        fail: fails every request, because no engine is left.
    """

    def __init__(
        self,
        seats: Sequence[Seat],
        *,
        asleep: Callable[[], bool],
        awake: Callable[[], Awaitable[None]],
        wait_s: float,
        on_lost: Callable[[Seat], int],
        on_back: Callable[[EngineInfo], Awaitable[None]],
        fail: Callable[[Exception], None],
    ):
        self.seats = list(seats)
        self.homeless: Callable[[str], bool] = lambda name: False
        """Returns True if no machine has room for the engine of this name; called in a thread."""
        self.restart: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
        """Makes room on the devices for an engine that starts again inside the block."""
        self.keeps = False
        """True if no sync brings weights: engines sleep with theirs."""
        self.mixed = False
        """As in ``SyncTarget``."""
        self.restarts = 0
        self._closed = False
        self.asleep, self.awake = asleep, awake
        self._wait_s, self._on_lost, self._on_back, self._fail = wait_s, on_lost, on_back, fail

    @property
    def targets(self) -> list[SyncTarget]:
        """The engines that are up, as weight sync sees them. A restarted engine is a new object."""
        return [SyncTarget(seat.name, seat.engine, mixed=self.mixed) for seat in self.up if seat.engine is not None]

    @property
    def up(self) -> list[Seat]:
        return [seat for seat in self.seats if seat.engine is not None]

    def start(self, infos: Iterable[EngineInfo]) -> None:
        """Notes that the engines are up; ``infos`` in the order of the seats."""
        for seat, info in zip(self.seats, infos, strict=True):
            self._begin_life(seat, info)

    def report_lost(self, engine: RemoteEngine) -> None:
        """Notes that this life of an engine is over. Others get its unanswered requests, and it is restarted."""
        seat = next((seat for seat in self.seats if seat.engine is engine), None)
        if seat is None or self._closed:
            return
        seat.state, seat.engine = "down", None
        count = self._on_lost(seat)
        log.warning("engine %s died; it is started again, and its %d requests go to others", seat.name, count)
        seat.revival = asyncio.ensure_future(self._revive(seat))

    def close(self) -> None:
        self._closed = True
        for seat in self.seats:
            if seat.revival is not None:
                seat.revival.cancel()

    async def _revive(self, seat: Seat) -> None:
        """Waits for the new process, builds its engine, and has it synced."""
        import ray

        since = time.monotonic()
        try:
            while True:
                try:
                    await seat.actor.alive.remote()
                    async with self.restart():
                        info = await seat.actor.start.remote(*seat.start_arguments)
                        if self.asleep():
                            await seat.actor.sleep.remote(self.keeps)
                    break
                except ray.exceptions.ActorUnavailableError:
                    await self._look_for_machine(seat, time.monotonic() - since)
                    await asyncio.sleep(RETRY_S)
        except Exception as error:
            seat.state = "gone"
            reason = plain_error(error, f"engine {seat.name}") if isinstance(error, ray.exceptions.RayError) else error
            log.error("engine %s cannot be started again: %s", seat.name, reason)
            self._fail_if_none_is_left(LostError(f"no engine is left: {reason}"))
            return
        self.restarts += 1
        self._begin_life(seat, info)
        try:
            await self._on_back(info)
        except Exception as error:
            if seat.revival is not asyncio.current_task():
                return  # it died again, which is seen to elsewhere
            log.error("engine %s is up again, but cannot serve: %s", seat.name, error)
            self._fail_if_none_is_left(RunError(f"no engine has the run's weights: {error}"))

    def _fail_if_none_is_left(self, error: Exception) -> None:
        if not any(seat.state in ("serving", "down") for seat in self.seats):
            self._fail(error)

    async def _look_for_machine(self, seat: Seat, waited_s: float) -> None:
        """Logs, once, that no machine has room for an engine. Raises ``LostError`` if the run is then without any."""
        if not await asyncio.to_thread(self.homeless, seat.name):
            seat.state = "down"
            return
        others = sum(other.state not in ("homeless", "gone") for other in self.seats if other is not seat)
        if seat.state == "down" and waited_s > MOVE_S:
            seat.state = "homeless"
            until = f"the run goes on with {others} of {len(self.seats)}" if others else f"the run waits {self._wait_s:g} s"
            log.warning("engine %s: no machine has room for it now that its own is gone; %s until one joins", seat.name, until)
        if seat.state == "homeless" and not others and waited_s > self._wait_s:
            raise LostError(f"no machine has had room for it for {waited_s:.0f} s")

    def _begin_life(self, seat: Seat, info: EngineInfo) -> None:
        seat.engine, seat.state = RemoteEngine(self, seat, info), "unsynced"


def is_lost(error: Exception) -> bool:
    """Returns True if a call failed because the process is gone, and not because of an error in the called code."""
    from ray.exceptions import RayTaskError

    return isinstance(error.cause, LifeOver) if isinstance(error, RayTaskError) else True
