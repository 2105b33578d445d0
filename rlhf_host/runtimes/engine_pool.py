"""Several engines in processes of their own that act as one: who gets which request, and what happens when one dies."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_host.engines.requests import Request
from rlhf_host.errors import LostError, RunError
from rlhf_host.protocols import EngineTraits, SyncTarget
from rlhf_host.records.episodes import Generation, SampleKey, Sampling
from rlhf_host.runtimes.dispatch import Dispatcher, Lane, Ticket
from rlhf_host.runtimes.ray_actors import EngineInfo, EngineSetup, LifeOver
from rlhf_host.runtimes.worker_group import plain_error, wait_all

log = logging.getLogger(__name__)

State = Literal["serving", "unsynced", "down", "homeless", "gone"]
"""Serving; up but without the run's current weights; being started again; waiting for a machine; never to come back."""

QUIET_S = 0.05
"""Engines that work in waves get requests when all that may come are there, or no new one came for so long."""
RETRY_S = 0.5
"""Between attempts to reach an engine that is being started again."""
MOVE_S = 3.0
"""How long Ray may take to find another machine for an engine whose own is gone, before that is said."""
AHEAD = 2
"""An engine gets so many times what it decodes together, so that it never waits for more; the rest goes to whoever is free."""

_PRIVATE = itertools.count(1)
"""Numbers, made negative, of requests that go past the queue."""


class EngineLost(LostError):
    """An engine's process died while something was asked of it."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A ticket's content."""

    request: Request
    future: asyncio.Future[Generation]


@dataclass(eq=False, slots=True)
class _Seat:
    """One engine as the pool sees it."""

    name: str
    actor: Any
    setup: EngineSetup
    lane: Lane
    state: State = "unsynced"
    engine: RemoteEngine | None = None
    aborted: list[int] | None = None
    revival: asyncio.Task[None] | None = None


class RemoteEngine:
    """One life of an engine as weight sync sees it (``SyncTarget.engine``)."""

    def __init__(self, pool: EnginePool, seat: _Seat, info: EngineInfo):
        self.name, self.life, self.version, self.pid = seat.name, info.life, info.version, info.pid
        self._pool, self._seat = pool, seat

    async def run(self, function: str, **arguments: Any) -> Any:
        """``"package.module:function"(loader, **arguments)`` in the engine's process.

        Raises:
            EngineLost: this life of it is over.
        """
        import ray

        if self._seat.engine is not self:
            raise EngineLost(f"engine {self.name} has died")
        try:
            result, self.version = await self._seat.actor.run.remote(self.life, function, arguments)
        except ray.exceptions.RayError as error:
            if not _lost(error):
                raise plain_error(error, f"engine {self.name}") from error
            self._pool.report_lost(self, error)
            raise EngineLost(f"engine {self.name} has died") from error
        return result

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        """One completion from this very engine. Raises as the engine does, and ``EngineLost``."""
        import ray

        if self._seat.engine is not self:
            raise EngineLost(f"engine {self.name} has died")
        request = Request(tuple(token_ids), sampling, key)
        stream = self._seat.actor.generate.options(num_returns="streaming").remote(self.life, [(-next(_PRIVATE), request)])
        try:
            async for reference in stream:
                ((_, answer),) = await reference
                if isinstance(answer, Exception):
                    raise answer
                return answer
        except ray.exceptions.RayError as error:
            if not _lost(error):
                raise plain_error(error, f"engine {self.name}") from error
            self._pool.report_lost(self, error)
        raise EngineLost(f"engine {self.name} has died")

    def set_version(self, version: int) -> None:
        """Raises ``RunError`` unless the engine itself says that it holds ``version``: its own word counts."""
        if self.version != version:
            raise RunError(f"engine {self.name} holds weights of version {self.version}, not {version}: they did not arrive")


class EnginePool:
    """``protocols.Generator`` over several.

    A group's samples go to one engine, which has their prompt cached; new groups to the one with the fewest tokens in flight. All
    of one turn of the event loop travels in one call. An engine that dies is started again and given the current weights;
    meanwhile the others take over what it had not answered, and a request is answered once, whoever does it.

    Call everything but ``start`` on the run's event loop.
    """

    def __init__(self, actors: Sequence[tuple[str, Any, EngineSetup]], traits: EngineTraits, *, wait_s: float = 60.0):
        self._queue = Dispatcher(len(actors))
        self._waves = traits.waves
        for lane in self._queue.lanes:
            lane.capacity = None if traits.largest_batch is None else AHEAD * traits.largest_batch
        self._seats = [_Seat(*parts, lane) for parts, lane in zip(actors, self._queue.lanes, strict=True)]
        self.version = -1
        self.resync: Callable[[], Awaitable[None]] | None = None
        """Brings the current version to all ``targets`` that lack it; called after an engine was started again."""
        self.homeless: Callable[[str], bool] = lambda name: False
        """Whether no machine has room for the engine of this name; called in a thread."""
        self.restarts = 0
        self._wait_s = wait_s
        self._numbers = itertools.count()
        self._expected = 0
        self._news = 0.0
        self._dispatching = False
        self._holding = False
        self._readers: set[asyncio.Task[None]] = set()
        self._busy_since: float | None = None
        self._busy_s = 0.0
        self._closed = False
        self._asleep = False
        self._waking: asyncio.Task[None] | None = None
        self.before_sampling: Callable[[], None] = self.wake
        """Called in a thread before requests go to engines that sleep; wakes them."""

    # --- what the run sees ------------------------------------------------------------------------

    @property
    def targets(self) -> list[SyncTarget]:
        """The engines that are up, as weight sync sees them; another list of other objects after each that was started again."""
        return [SyncTarget(seat.name, seat.engine) for seat in self._seats if seat.engine is not None]

    @property
    def busy_s(self) -> float:
        """Seconds in which something was being generated."""
        since = self._busy_since
        return self._busy_s + (time.perf_counter() - since if since is not None else 0.0)

    def expect(self, count: int) -> None:
        self._expected = count

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        """Raises ``RunError`` when there are no weights yet, or no engine is left."""
        if self._closed:
            raise RunError("the engines are closed")
        if all(seat.state == "gone" for seat in self._seats):
            raise RunError("no engine is left")
        if self.version < 0:
            raise RunError("the engines have no weights of this run yet: sync them first")
        loop = asyncio.get_running_loop()
        call = _Call(Request(tuple(token_ids), sampling, key), loop.create_future())
        # A key ends in the sample and its turn: the rest is the task's.
        ticket = Ticket(next(self._numbers), key[:-2], len(token_ids) + sampling.max_new_tokens, call)
        self._queue.arrived.append(ticket)
        self._news = time.monotonic()
        self._soon(loop)
        try:
            return await call.future
        except asyncio.CancelledError:
            self._drop(ticket)
            raise

    def synced(self, version: int) -> None:
        """``version`` was brought to the engines: those that say they hold it serve, others do not."""
        self.version = version
        for seat in self._seats:
            if seat.engine is not None:
                seat.state = "serving" if seat.engine.version == version else "unsynced"
                seat.lane.open = seat.state == "serving"
        self._dispatch()

    def set_version(self, version: int) -> None:
        for seat in self._seats:
            if seat.engine is not None:
                seat.engine.set_version(version)

    def start(self, infos: Iterable[EngineInfo]) -> None:
        """The engines are up; ``infos`` in the order of the actors."""
        for seat, info in zip(self._seats, infos, strict=True):
            self._seated(seat, info)

    def sleep(self) -> None:
        """Have the engines give their memory back until the next request; from any thread but the event loop's.

        Raises:
            RunError: while requests are in flight.
        """
        if self._asleep:
            return
        if self._queue.in_flight:
            raise RunError("the engines are at work")
        self._asleep = True  # at once, so that no request is sent to an engine on its way to bed
        try:
            self._everywhere("sleep")
        except RunError:
            self.wake()
            raise

    def wake(self) -> None:
        """Undo ``sleep``; from any thread but the event loop's."""
        if self._asleep:
            self._everywhere("wake")
            self._asleep = False

    def _everywhere(self, method: str) -> None:
        up = [seat for seat in self._seats if seat.engine is not None]
        references = [getattr(seat.actor, method).remote() for seat in up]
        wait_all(references, *(f"engine {seat.name}" for seat in up))

    async def close(self) -> None:
        """Fail what is pending, and let the engines release what they hold."""
        self._closed = True
        tasks = [*self._readers, *(seat.revival for seat in self._seats if seat.revival is not None)]
        for task in tasks:
            task.cancel()
        self._fail_all(RunError("the engines were closed while requests were pending"))
        closing = [asyncio.ensure_future(_wait(seat.actor.close.remote())) for seat in self._seats if seat.engine is not None]
        if closing:
            done, late = await asyncio.wait(closing, timeout=10.0)
            for task in done:
                task.exception()
            for task in late:
                task.cancel()

    # --- requests ---------------------------------------------------------------------------------

    def _soon(self, loop: asyncio.AbstractEventLoop) -> None:
        # Tasks started together all ask in one turn of the loop: only then is it seen who gets what.
        if not self._dispatching:
            self._dispatching = True
            loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._dispatching = False
        self._dispatch()

    def _dispatch(self) -> None:
        if self._closed or self._held_back():
            return
        if self._asleep:
            if self._waking is None:
                self._waking = asyncio.ensure_future(self._wake_up())
            return
        for seat, tickets in zip(self._seats, self._queue.deal(), strict=True):
            if tickets:
                self._send(seat, tickets)

    async def _wake_up(self) -> None:
        try:
            await asyncio.to_thread(self.before_sampling)
        except Exception as error:
            self._fail_all(error)
        self._waking = None
        self._dispatch()

    def _held_back(self) -> bool:
        """Whether engines that work in waves should wait for more: a wave is best with all that may come."""
        if not self._queue.arrived or not self._waves:
            return False
        patience = self._news + QUIET_S - time.monotonic()
        if len(self._queue.arrived) + self._queue.in_flight >= self._expected or patience <= 0:
            return False
        if not self._holding:
            self._holding = True
            asyncio.get_running_loop().call_later(patience, self._let_go)
        return True

    def _let_go(self) -> None:
        self._holding = False
        self._dispatch()

    def _send(self, seat: _Seat, tickets: Sequence[Ticket]) -> None:
        assert seat.engine is not None
        if self._busy_since is None:
            self._busy_since = time.perf_counter()
        prompts: dict[tuple[int, ...], tuple[int, ...]] = {}
        batch = []
        for ticket in tickets:
            request: Request = ticket.content.request
            # One object for equal prompts: it travels once.
            ids = prompts.setdefault(request.token_ids, request.token_ids)
            batch.append((ticket.number, Request(ids, request.sampling, request.key)))
        stream = seat.actor.generate.options(num_returns="streaming").remote(seat.engine.life, batch)
        reading = self._read(seat, seat.engine, stream, [ticket.number for ticket in tickets])
        self._readers.add(asyncio.ensure_future(reading))

    async def _read(self, seat: _Seat, engine: RemoteEngine, stream: Any, numbers: Sequence[int]) -> None:
        """Take answers as they come."""
        import ray

        try:
            async for reference in stream:
                self._take(seat, engine, await reference)
            if seat.engine is engine and any(number in seat.lane.sent for number in numbers):
                raise RunError(f"engine {seat.name} ended without answering every request")
        except ray.exceptions.RayError as error:
            if _lost(error):
                self.report_lost(engine, error)
            else:
                self._fail(seat, numbers, plain_error(error, f"engine {seat.name}"))
        except RunError as error:
            self._fail(seat, numbers, error)
        finally:
            if (task := asyncio.current_task()) is not None:
                self._readers.discard(task)

    def _take(self, seat: _Seat, engine: RemoteEngine, answers: Iterable[tuple[int, Generation | Exception]]) -> None:
        for number, answer in answers:
            ticket = self._queue.answered(seat.lane, number)
            if ticket is None or ticket.content.future.done():
                continue
            if isinstance(answer, Exception):
                ticket.content.future.set_exception(answer)
            elif answer.versions and not 0 <= min(answer.versions) <= max(answer.versions) <= engine.version:
                said = f"engine {seat.name} sampled with weights of version {min(answer.versions)}"
                ticket.content.future.set_exception(RunError(f"{said}, and was given {engine.version}"))
            else:
                ticket.content.future.set_result(answer)
        self._rest()
        if self._queue.waits:
            self._soon(asyncio.get_running_loop())

    def _rest(self) -> None:
        if self._busy_since is not None and not self._queue.in_flight:
            self._busy_s += time.perf_counter() - self._busy_since
            self._busy_since = None

    def _drop(self, ticket: Ticket) -> None:
        lane = self._queue.drop(ticket)
        if lane is None:
            return
        seat = next(seat for seat in self._seats if seat.lane is lane)
        if seat.aborted is None:
            seat.aborted = []
            asyncio.get_running_loop().call_soon(self._abort, seat)
        seat.aborted.append(ticket.number)

    def _abort(self, seat: _Seat) -> None:
        numbers, seat.aborted = seat.aborted, None
        if seat.engine is not None:
            seat.actor.abort.remote(numbers)

    def _fail(self, seat: _Seat, numbers: Iterable[int], error: Exception) -> None:
        self._reject((self._queue.answered(seat.lane, number) for number in numbers), error)

    def _fail_all(self, error: Exception) -> None:
        self._reject(self._queue.drain(), error)

    def _reject(self, tickets: Iterable[Ticket | None], error: Exception) -> None:
        for ticket in tickets:
            if ticket is not None and not ticket.content.future.done():
                ticket.content.future.set_exception(error)
        self._rest()

    # --- engines that die -------------------------------------------------------------------------

    def report_lost(self, engine: RemoteEngine, error: Exception) -> None:
        """This life of an engine is over: others get what it had not answered, and it is started again."""
        seat = next(seat for seat in self._seats if seat.name == engine.name)
        if seat.engine is not engine or self._closed:
            return
        count = self._queue.close(seat.lane)
        log.warning("engine %s died; it is started again, and its %d requests go to others", seat.name, count)
        seat.state, seat.engine = "down", None
        self._rest()
        seat.revival = asyncio.ensure_future(self._revive(seat))
        self._soon(asyncio.get_running_loop())

    async def _revive(self, seat: _Seat) -> None:
        """Wait for the new process, build its engine, have it synced."""
        import ray

        since = time.monotonic()
        try:
            while True:
                try:
                    info = await seat.actor.start.remote(seat.setup)
                    break
                except ray.exceptions.ActorUnavailableError:
                    await self._look_for_machine(seat, time.monotonic() - since)
                    await asyncio.sleep(RETRY_S)
        except (ray.exceptions.RayError, LostError) as error:
            seat.state = "gone"
            reason = error if isinstance(error, LostError) else plain_error(error, f"engine {seat.name}")
            log.error("engine %s does not come back: %s", seat.name, reason)
            if not any(other.state in ("serving", "down") for other in self._seats):
                self._fail_all(LostError(f"no engine is left: {reason}"))
            return
        self.restarts += 1
        self._seated(seat, info)
        if info.version == self.version:  # nothing is ever synced where nothing is trained
            self.synced(self.version)
        elif self.resync is not None:
            try:
                await self.resync()
            except Exception as error:
                if seat.revival is not asyncio.current_task():
                    return  # it died again, which is seen to elsewhere
                log.error("engine %s is up again, but cannot serve: %s", seat.name, error)
                if not any(other.state in ("serving", "down") for other in self._seats):
                    self._fail_all(RunError(f"no engine has the run's weights: {error}"))

    async def _look_for_machine(self, seat: _Seat, waited_s: float) -> None:
        """Say it, once, where no machine has room for an engine. Raises ``LostError`` when that leaves the run without any."""
        if not await asyncio.to_thread(self.homeless, seat.name):
            seat.state = "down"
            return
        others = sum(other.state not in ("homeless", "gone") for other in self._seats if other is not seat)
        if seat.state == "down" and waited_s > MOVE_S:
            seat.state = "homeless"
            until = f"the run goes on with {others} of {len(self._seats)}" if others else f"the run waits {self._wait_s:g} s"
            log.warning("engine %s: no machine has room for it now that its own is gone; %s until one joins", seat.name, until)
        if seat.state == "homeless" and not others and waited_s > self._wait_s:
            raise LostError(f"no machine has had room for it for {waited_s:.0f} s")

    def _seated(self, seat: _Seat, info: EngineInfo) -> None:
        seat.engine = RemoteEngine(self, seat, info)
        seat.state = "unsynced"


def _lost(error: Exception) -> bool:
    """Whether a call failed because the process is not there any more, and not in what was called."""
    from ray.exceptions import RayTaskError

    return isinstance(error.cause, LifeOver) if isinstance(error, RayTaskError) else True


async def _wait(reference: Any) -> Any:
    return await reference
