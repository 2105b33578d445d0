"""Groups that stay open across steps: sampling goes on while the trainer works."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rlhf_host.data.stream import TaskStream
from rlhf_host.errors import RunError, UserError
from rlhf_host.records.needs import ScoreContext
from rlhf_host.rollouts.admission import Admission
from rlhf_host.rollouts.collect import Collected, Collector, Played, refuse_empty

BEFORE = -1
"""Version that stands for all before the run was resumed."""
CLOSE_S = 10.0
"""Seconds that closing waits for cancelled episodes."""


@dataclass(slots=True)
class _Open:
    """A draw that is in no batch."""

    place: dict[str, Any]
    """Position of the stream before it."""
    epoch: int
    task: asyncio.Task[Played] | None = None
    played: Played | None = None
    over: int = BEFORE
    """Version under which it finished."""
    collected: Collected | None = None
    """Counts that its verdict added."""


class Pipeline:
    """Batches of groups that were begun up to ``admission.max_age`` versions ago, in the order of the draws unless
    ``admission`` lets some pass others. Groups dropped by filters without a state are replaced at once. With depth 0 no draw
    begins before its step, and none is open after it.

    It changes on the event loop only. The controller may call ``state_dict`` and ``finished`` at any time.

    Args:
        context: context for rewards; its step is that of the admission.
        fixed: draws begin at once under a version and finish before the next one. With an engine whose batches do not depend on
            timing, a repeated run gives the same values.
    """

    steps = None
    epoch = 0

    def __init__(
        self, stream: TaskStream, collector: Collector, admission: Admission, context: ScoreContext, *, fixed: bool = False
    ):
        if (depth := admission.depth) and not stream.goes_back:
            raise UserError(f"async_depth is {depth}, and a task source has a state of its own: leave --async-depth out")
        self.stream, self.collector, self.admission, self.context = stream, collector, admission, context
        self.fixed = fixed
        self.weights = {alias: weight for alias, (_, weight) in collector.judges.items()}
        self._open: dict[int, _Open] = {}
        self._restored: dict[int, Played] = {}
        self._filled = Collected()
        """Counts of the batch that is being filled."""
        self.max_age = admission.max_age
        self._tasks: set[asyncio.Task[Played]] = set()
        self._ending: set[asyncio.Task[Played]] = set()
        """Tasks of draws that were given back."""
        self._news = asyncio.Event()
        """Set whenever a draw finishes, however it ends; waiting tasks then check their condition."""
        self._error: BaseException | None = None
        self._closed = False

    async def next_rollouts(self, context: ScoreContext) -> Collected:
        """Returns the groups of the next batch as soon as they are finished. Raises the error of a group that the batch cannot
        do without.
        """
        if not self.admission.depth:
            self._admit()
        taken = await self.collector.watched(self._next())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*self._ending, return_exceptions=True), CLOSE_S)
        self._ending.clear()
        collected = Collected()
        for ordinal in taken:
            one = self._open.pop(ordinal)
            assert one.collected is not None
            collected.add(one.collected)
            self.epoch = one.epoch
        refuse_empty(collected)
        return collected

    async def _next(self) -> Sequence[int]:
        if self._error is not None:
            raise self._error
        while (taken := self.admission.take()) is None:
            await self._wait()
        return taken

    async def published(self, version: int) -> None:
        """Notes that the engines have the weights of ``version``, so more draws may begin."""
        self.admission.publish(version)
        if self.admission.depth:
            self._admit()

    async def wait_until_over(self) -> None:
        """Waits, if ``fixed``, until all open draws are finished."""
        await self.collector.watched(self._rest())

    async def _rest(self) -> None:
        while self.fixed and not self._still:
            await self._wait()

    @property
    def _still(self) -> bool:
        """True if all open draws are finished."""
        return all(one.played is not None for one in self._open.values())

    async def close(self) -> None:
        """Cancels open draws."""
        self._closed = True
        for task in (open_ := self._tasks | self._ending):
            task.cancel()
        if open_:
            await asyncio.wait(open_, timeout=CLOSE_S)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the stream before the first draw that is in no batch. A resumed run draws again from there,
        and skips draws that a batch has.
        """
        first = self._open.get(self.admission.taken)
        place = first.place if first is not None else self.stream.state_dict()
        return {**place, "ordinal": self.admission.taken, "passed": sorted(self.admission.passed), "max_age": self.max_age}

    def finished(self) -> dict[int, Played]:
        """Returns ordinal → finished group that is in no batch. A resumed run does not play it again."""
        version = self.admission.version
        return {
            ordinal: one.played
            for ordinal, one in list(self._open.items())
            if one.played is not None and not (self.fixed and one.over == version)  # those go on together
        } | self._restored

    def load_state_dict(self, state: Mapping[str, Any], finished: Mapping[int, Played]) -> None:
        """Restores the position.

        Args:
            finished: as returned by ``finished``.
        """
        self.stream.load_state_dict(state)
        self.admission.begin_at(state["ordinal"], state.get("passed", ()))
        self._restored = dict(finished)
        if finished:
            self.max_age = max(self.max_age, state["max_age"])

    def _admit(self) -> None:
        """Begins as many draws as there is room for, after the restored ones."""
        if self._closed or self._error is not None or (self.fixed and not self._still):
            return
        while True:
            try:
                # What was restored and given back waits for the next batch.
                while self.admission.has_capacity or (self.admission.depth and self.admission.admitted in self._restored):
                    self._begin()
            except Exception as error:
                return self._fail(error)
            if not self._settle():  # what was restored may leave room
                return

    def _begin(self) -> None:
        """Begins the next draw."""
        episodes, step = self.collector.episodes, self.admission.version + 1
        place = self.stream.state_dict()
        [draw] = self.stream.draw(1, step)
        if self.admission.pass_over():
            return
        episodes.agent_key(draw.task)  # an unknown agent is refused before anything starts
        ordinal = self.admission.admit()
        one = self._open[ordinal] = _Open(place, self.stream.epoch)
        if (played := self._restored.pop(ordinal, None)) is not None and played.is_of(draw.task):
            played.belong_to(draw.task, episodes.decode)
            one.played = played
            self.admission.over(ordinal)
            return
        task = one.task = self.collector.begin(f"train-{ordinal}", draw, replace(self.context, step=step))
        self._tasks.add(task)
        task.add_done_callback(partial(self._over, ordinal, one))

    def _over(self, ordinal: int, one: _Open, task: asyncio.Task[Played]) -> None:
        self._tasks.discard(task)
        if self._open.get(ordinal) is not one:
            return  # it was given back
        self._news.set()
        try:
            one.played, one.over = task.result(), self.admission.version
            self._take_in(ordinal, one.played)
        except asyncio.CancelledError:
            self._fail(RunError("a group was cancelled, and not by the host"))
        except BaseException as error:
            self._fail(error)

    def _take_in(self, ordinal: int, played: Played) -> None:
        """Adds a finished draw to a batch, and begins the draws that now have room."""
        if self.fixed and not self._still:
            return
        if not (self.fixed or self.collector.in_order):
            self.admission.verdict(ordinal, kept=self.collector.ask(played))
            self._admit()
        self.admission.over(ordinal)
        if self._settle():
            self._admit()

    def _settle(self) -> bool:
        """Puts finished draws into batches, in their turn; returns True if there were any."""
        settled = self.admission.unsettled
        while (one := self._open.get(ordinal := self.admission.unsettled)) is not None and one.played is not None:
            one.collected = Collected(drawn=1)
            self.admission.settle(kept=self.collector.settle(ordinal, one.played, one.collected))
            self._filled.add(one.collected)
            if self._filled.drawn >= self.admission.batch:  # fewer may be unlucky
                self.collector.check(self._filled, replace(self.context, step=self.admission.version + 1))
            if not self.admission.filling:
                self._filled = Collected()
                self._give_back(self.admission.surplus())
        return self.admission.unsettled != settled

    def _give_back(self, surplus: Iterable[int]) -> None:
        """Ends draws as if they had never begun."""
        first: _Open | None = None
        for ordinal in surplus:
            one = self._open.pop(ordinal)
            first = first or one
            if one.played is not None and one.over == BEFORE:
                self._restored[ordinal] = one.played
            elif one.task is not None and not one.task.done():
                one.task.cancel()
                self._tasks.discard(one.task)
                self._ending.add(one.task)
        if first is not None:
            self.stream.load_state_dict(first.place)

    async def _wait(self) -> None:
        """Waits until a draw finishes. Raises what went wrong."""
        if self._error is not None:
            raise self._error
        self._news.clear()
        await self._news.wait()

    def _fail(self, error: BaseException) -> None:
        """Passes the error to whoever waits for a batch."""
        if not self._closed and self._error is None:
            self._error = error
