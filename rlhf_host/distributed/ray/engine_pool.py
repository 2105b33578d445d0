"""Several engines in their own processes that act as one: which engine gets which request, and when."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from rlhf_host.distributed.ray.actors import EngineInfo
from rlhf_host.distributed.ray.dispatch import Dispatcher, Lane, Ticket
from rlhf_host.distributed.ray.engine_revival import EngineLives, RemoteEngine, Seat, is_lost
from rlhf_host.distributed.ray.worker_group import plain_error, wait_all
from rlhf_host.engines.requests import Request, Waiting
from rlhf_host.errors import LostError, RunError
from rlhf_host.protocols import EngineTraits
from rlhf_host.records.episodes import Generation, SampleKey, Sampling
from rlhf_host.records.tensors import Metric
from rlhf_host.spans import span

QUIET_S = 0.05
"""Seconds without a new request after which engines that work in waves get requests, even if not all expected ones have come."""
AHEAD = 2
"""Requests per engine, as a multiple of what it decodes together, so that it never waits; the rest goes to any engine that is
free.
"""
CLOSE_S = 30.0
"""Seconds for engines to free their resources; after that they are killed. vLLM gives its own processes 5 seconds."""


class EnginePool:
    """A ``protocols.Generator`` over several engines.

    A group's samples go to one engine, which has their prompt cached; new groups go to the engine with the fewest tokens in
    flight. All requests of one turn of the event loop are sent in one call. An engine that dies is started again
    (``EngineLives``); meanwhile the others take over its unanswered requests. Every request is answered exactly once.

    Call everything but ``lives.start``, ``sleep`` and ``wake`` on the run's event loop.
    """

    def __init__(self, actors: Sequence[tuple[str, Any, tuple[Any, ...]]], traits: EngineTraits, *, wait_s: float = 60.0):
        """Creates the pool.

        Args:
            actors: per engine its name, its actor, and the arguments of that actor's ``start``.
        """
        self._queue = Dispatcher(len(actors))
        self._waves = traits.waves
        for lane in self._queue.lanes:
            lane.capacity = None if traits.largest_batch is None else AHEAD * traits.largest_batch
        seats = [Seat(*parts, lane) for parts, lane in zip(actors, self._queue.lanes, strict=True)]
        self.lives = EngineLives(
            seats,
            asleep=lambda: self._asleep,
            awake=self.awake,
            wait_s=wait_s,
            on_lost=self._give_to_others,
            on_back=self._bring_up,
            fail=self._fail_all,
        )
        self.version = -1
        self.coming = -1
        """Version that is being brought: an engine may have it before that is known here."""
        self.resync: Callable[[], Awaitable[None]] | None = None
        """Brings the current version to all ``targets`` that lack it; called after an engine was restarted, and before requests
        if all have slept without weights.
        """
        self._numbers = itertools.count()
        self._expected = 0
        self._news = 0.0
        self._scheduled: asyncio.TimerHandle | None = None
        self._aborted: dict[Lane, list[int]] = defaultdict(list)
        self._readers: set[asyncio.Task[None]] = set()
        self._sampled: dict[str, int] = {}
        """Life of an engine → number of tokens that it has sampled."""
        self._busy_since: float | None = None
        self._busy_s = 0.0
        self._closed = False
        self._asleep = False
        self._waking: asyncio.Task[None] | None = None
        self.before_sampling: Callable[[], None] = self.wake
        """Called in a thread before requests go to sleeping engines; wakes them."""
        self._rising = asyncio.Lock()
        self._changing = asyncio.Lock()
        self._change: tuple[str, dict[str, Any]] | None = None
        """Function and arguments of the last ``run`` that changed the weights."""

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one engine was generating."""
        since = self._busy_since
        return self._busy_s + (time.perf_counter() - since if since is not None else 0.0)

    @property
    def sampled(self) -> int:
        """Number of tokens that the engines have sampled, by their last reports."""
        return sum(self._sampled.values())

    def expect(self, count: int) -> None:
        self._expected = count

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        """Generates one completion. Raises ``RunError`` if there are no weights yet, or no engine is left."""
        if self._closed:
            raise RunError("the engines are closed")
        if all(seat.state == "gone" for seat in self.lives.seats):
            raise RunError("no engine is left")
        if self.version < 0:
            raise RunError("the engines have no weights of this run yet: sync them first")
        call = Waiting(Request.of(token_ids, sampling, key), asyncio.get_running_loop().create_future())
        # A key ends in the sample and its turn: the rest is the task's.
        ticket = Ticket(next(self._numbers), key[:-2], len(token_ids) + sampling.max_new_tokens, call)
        self._queue.arrived.append(ticket)
        self._news = time.monotonic()
        self._dispatch_soon()
        try:
            return await call.future
        except asyncio.CancelledError:
            self._drop(ticket)
            raise

    async def run(self, function: str, **arguments: Any) -> list[Any]:
        """Runs ``"package.module:function"(loader, **arguments)`` in the processes of all engines; returns the results of those
        that live. Requests wait meanwhile. Where no sync brings weights, an engine that starts again later gets those of the last
        function that changed them.

        Raises:
            LostError: no engine is left.
        """
        async with self._changing:
            while not (results := await self._run(self.lives.up, function, arguments)):
                if all(seat.state == "gone" for seat in self.lives.seats):
                    raise LostError("no engine is left")
                await asyncio.sleep(QUIET_S)
            return results

    async def _run(self, seats: Sequence[Seat], function: str, arguments: dict[str, Any]) -> list[Any]:
        await self.awake()
        for seat in seats:
            seat.lane.open = False
        while any(seat.lane.sent for seat in seats):
            await asyncio.sleep(QUIET_S)
        before = {seat.engine: seat.engine.version for seat in seats if seat.engine is not None}
        answers = await asyncio.gather(*(each.run(function, **arguments) for each in before), return_exceptions=True)
        changed = [each.version for each, version in before.items() if each.version != version]
        if changed and self.resync is None:
            self._change, self.version = (function, arguments), changed[0]
        self.synced(self.version)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, LostError):
                raise answer
        return [result for answer in answers if isinstance(answer, list) for result in answer]

    async def metrics(self) -> list[Metric]:
        """Returns the metrics of the engines that answer; an engine that died has none."""
        asked = [seat.actor.metrics.remote(seat.engine.life) for seat in self.lives.up if seat.engine is not None]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [metric for answer in answers if not isinstance(answer, BaseException) for metric in answer]

    def synced(self, version: int) -> None:
        """Notes that ``version`` was brought to the engines: those that report it are used, others are not."""
        self.version = version
        for seat in self.lives.seats:
            if seat.engine is not None:
                seat.state = "serving" if seat.engine.version == version else "unsynced"
                seat.lane.open = seat.state == "serving"
        self._dispatch()

    @property
    def at_work(self) -> bool:
        """True while requests are in flight, or weights change."""
        return bool(self._queue.in_flight) or self._changing.locked()

    @property
    def empty(self) -> bool:
        """True if its engines have no weights, so that a sync has to come before they sample."""
        engines = [target.engine for target in self.lives.targets]
        return bool(engines) and all(engine.version < 0 for engine in engines)

    def sleep(self, *, keep: bool) -> None:
        """Makes the engines free their memory until the next request.

        Args:
            keep: keep the weights. Otherwise engines that can do without have none until the next sync.

        Raises:
            RunError: requests are in flight.
        """
        if self._asleep:
            return
        if self.at_work:
            raise RunError("the engines are at work")
        self._asleep = True  # at once, so that no request is sent to an engine on its way to bed
        try:
            for engine, version in self._everywhere(lambda actor: actor.sleep.remote(keep or self.lives.keeps)):
                engine.version = version
        except RunError:
            self.wake()
            raise

    def wake_weights(self) -> None:
        """Makes sleeping engines ready for a sync. They sample nothing before ``wake``."""
        if self._asleep and not self.lives.keeps:
            self._everywhere(lambda actor: actor.wake.remote(True))

    def wake(self) -> None:
        """Reverses ``sleep``."""
        if self._asleep:
            self._everywhere(lambda actor: actor.wake.remote(False))
            self._asleep = False

    async def awake(self) -> None:
        """Wakes the engines if they sleep, once for all who ask."""
        async with self._rising:
            if self._asleep:
                await asyncio.to_thread(self.before_sampling)

    def _everywhere(self, call: Callable[[Any], Any]) -> list[tuple[RemoteEngine, Any]]:
        """Returns the answers of the engines that are up. One that has died is left to its next request or sync, which starts it
        again.

        Raises:
            LostError: all have died.
        """
        asked = [(seat.engine, call(seat.actor), f"engine {seat.name}") for seat in self.lives.up if seat.engine is not None]
        answers, lost = [], None
        for engine, reference, name in asked:
            try:
                answers.append((engine, wait_all([reference], name)[0]))
            except LostError as error:
                lost = error
        if lost is not None and not answers:
            raise lost
        return answers

    async def close(self) -> None:
        """Fails pending requests, and lets the engines free their resources."""
        self._closed = True
        self.lives.close()
        for task in self._readers:
            task.cancel()
        self._fail_all(RunError("the engines were closed while requests were pending"))
        with contextlib.suppress(Exception):
            closing = (seat.actor.close.remote() for seat in self.lives.up)
            await asyncio.wait_for(asyncio.gather(*closing, return_exceptions=True), CLOSE_S)

    def _dispatch_soon(self, delay: float = 0.0) -> None:
        # Tasks started together all ask in one turn of the loop: only then is it seen who gets what.
        loop = asyncio.get_running_loop()
        if self._scheduled is not None:
            if self._scheduled.when() <= loop.time() + delay:
                return
            self._scheduled.cancel()
        self._scheduled = loop.call_later(delay, self._dispatch)

    def _dispatch(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        if self._closed:
            return
        if (patience := self._patience()) > 0:
            self._dispatch_soon(patience)
        elif self._asleep:
            if self._waking is None:
                self._waking = asyncio.ensure_future(self._wake_up())
        else:
            for seat, tickets in zip(self.lives.seats, self._queue.deal(), strict=True):
                if tickets and seat.engine is not None:
                    self._send(seat, seat.engine, tickets)

    async def _wake_up(self) -> None:
        try:
            while self.empty and self.resync is not None and not self._closed:
                await self.resync()
                if self.empty:  # training is ahead of every version, or other engines use the devices
                    await asyncio.sleep(QUIET_S)
            await self.awake()
        except Exception as error:
            self._fail_all(error)
        self._waking = None
        if not self._asleep:
            self._dispatch()

    def _patience(self) -> float:
        """Returns how long engines that work in waves should wait for more requests: a wave is best with all expected ones."""
        arrived = len(self._queue.arrived)
        if not self._waves or not arrived or arrived + self._queue.in_flight >= self._expected:
            return 0.0
        return self._news + QUIET_S - time.monotonic()

    def _send(self, seat: Seat, engine: RemoteEngine, tickets: Sequence[Ticket]) -> None:
        if self._busy_since is None:
            self._busy_since = time.perf_counter()
        prompts: dict[tuple[int, ...], tuple[int, ...]] = {}
        batch = []
        for ticket in tickets:
            request: Request = ticket.content.request
            # One object for equal prompts: it travels once.
            ids = prompts.setdefault(request.token_ids, request.token_ids)
            batch.append((ticket.number, Request(ids, request.sampling, request.key)))
        stream = seat.actor.generate.options(num_returns="streaming").remote(engine.life, batch)
        reader = asyncio.ensure_future(self._read(seat, engine, stream, [ticket.number for ticket in tickets]))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)

    async def _read(self, seat: Seat, engine: RemoteEngine, stream: Any, numbers: Sequence[int]) -> None:
        """Reads answers as they come."""
        import ray

        try:
            with span(f"engine {seat.name}, {len(numbers)} requests"):
                async for reference in stream:
                    self._sampled[engine.life], answers = await reference
                    self._take(seat, engine, answers)
            if seat.engine is engine and any(number in seat.lane.sent for number in numbers):
                raise RunError(f"engine {seat.name} ended without answering every request")
        except ray.exceptions.RayError as error:
            if is_lost(error):
                self.lives.report_lost(engine)
            else:
                self._fail(seat.lane, numbers, plain_error(error, f"engine {seat.name}"))
        except Exception as error:
            self._fail(seat.lane, numbers, error)

    def _take(self, seat: Seat, engine: RemoteEngine, answers: Iterable[tuple[int, Generation | Exception]]) -> None:
        for number, answer in answers:
            ticket = self._queue.answered(seat.lane, number)
            if ticket is None or ticket.content.future.done():
                continue
            if isinstance(answer, Exception):
                ticket.content.future.set_exception(answer)
            elif answer.versions and not 0 <= min(answer.versions) <= max(answer.versions) <= (
                newest := max(engine.version, self.coming)
            ):
                sampled = f"engine {seat.name} sampled with weights of the versions {sorted(set(answer.versions))}"
                ticket.content.future.set_exception(RunError(f"{sampled}, and was given {newest}"))
            else:
                ticket.content.future.set_result(answer)
        self._go_on()

    def _go_on(self) -> None:
        """Sends waiting requests to engines that now have room; notes if nothing is in flight."""
        if self._queue.waits:
            self._dispatch_soon()
        if self._busy_since is not None and not self._queue.in_flight:
            self._busy_s += time.perf_counter() - self._busy_since
            self._busy_since = None

    def _drop(self, ticket: Ticket) -> None:
        lane = self._queue.drop(ticket)
        if lane is not None:
            if not self._aborted:
                asyncio.get_running_loop().call_soon(self._abort)
            self._aborted[lane].append(ticket.number)

    def _abort(self) -> None:
        for seat in self.lives.up:
            if numbers := self._aborted.get(seat.lane):
                seat.actor.abort.remote(numbers)
        self._aborted.clear()

    def _fail(self, lane: Lane, numbers: Iterable[int], error: Exception) -> None:
        self._reject((self._queue.answered(lane, number) for number in numbers), error)

    def _fail_all(self, error: Exception) -> None:
        self._reject(self._queue.drain(), error)

    def _reject(self, tickets: Iterable[Ticket | None], error: Exception) -> None:
        for ticket in tickets:
            if ticket is not None and not ticket.content.future.done():
                ticket.content.future.set_exception(error)
        self._go_on()

    def _give_to_others(self, seat: Seat) -> int:
        count = self._queue.close(seat.lane)
        self._go_on()
        return count

    async def _bring_up(self, info: EngineInfo) -> None:
        if self._change is not None:
            while self._asleep:  # whoever wakes it has made room
                await asyncio.sleep(QUIET_S)
            async with self._changing:
                lacking = [seat for seat in self.lives.up if seat.engine is not None and seat.engine.version != self.version]
                await self._run(lacking, *self._change)
        elif info.version == self.version:  # nothing is ever synced where nothing is trained
            self.synced(self.version)
        elif self.resync is not None:
            await self.resync()
