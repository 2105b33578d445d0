"""Collection of a batch: tasks become episodes, groups are scored as they finish, filters drop some, and more tasks are drawn."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, TypeVar

from rlhf_host.data.stream import Draw
from rlhf_host.errors import RunError, asks_to_stop
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.records.episodes import FAILED, Drop, Episode, EpisodeFailed, Group, Task, Trajectory
from rlhf_host.records.metric_names import MetricNames
from rlhf_host.records.needs import ScoreContext
from rlhf_host.records.pictures import Picture
from rlhf_host.rollouts.episodes import Episodes, episode_seed
from rlhf_host.rollouts.gate import Barrier
from rlhf_host.rollouts.scoring import brings_signal, judges, score_group
from rlhf_host.rollouts.watch import watched
from rlhf_host.spans import span

T = TypeVar("T")
log = logging.getLogger(__name__)

REMIND = 20
"""Steps before it is said again that trajectories could not be judged."""
TELL_S = {"eval": 20.0, "train": 60.0}
"""Seconds between two reports of a split's progress."""
SHOWN = 3
"""Number of groups that a message names."""


class NoBatchError(RunError):
    """No batch can be made from the draws.

    Args:
        draws: their outcomes, as in ``Collected``.
    """

    def __init__(self, message: str, draws: Sequence[tuple[int, str, int, str]] = ()):
        super().__init__(message)
        self.draws = draws


@dataclass(slots=True)
class Collected:
    """Results of a rollout: the kept groups in the order their tasks were drawn, and counts of events."""

    groups: list[Group] = field(default_factory=list)
    drawn: int = 0
    first: int = 0
    """Number of the first draw in the run."""
    trajectories: int = 0
    unjudged: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    """Counts of how episodes ended: ``finished``, ``truncated`` or ``failed``, and for failures of a hook
    ``failed/AGENT:TYPE``.
    """
    dropped: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    """Counts from the logs of episodes: calls of the policy, and anything unusual about them."""
    draws: list[tuple[int, str, int, str]] = field(default_factory=list)
    """Number of each draw, source and index of its task, and its outcome: ``trained``, ``dropped: REASON``, ``unjudged`` or
    ``failed``.
    """
    unjudged_rows: list[Trajectory] = field(default_factory=list)
    """Unjudged trajectories, for the log, and rows that represent failed episodes."""

    def add(self, other: Collected) -> None:
        """Adds the results of a later rollout."""
        self.groups += other.groups
        self.drawn += other.drawn
        self.trajectories += other.trajectories
        for name in ("unjudged", "failed", "states", "dropped", "events"):
            getattr(self, name).update(getattr(other, name))
        self.draws += other.draws
        self.unjudged_rows += other.unjudged_rows

    def note_unjudged(self, rows: Sequence[Trajectory]) -> None:
        """Counts the trajectories, and those without a reward."""
        self.trajectories += len(rows)
        self.unjudged_rows += (missed := [row for row in rows if row.reward is None])
        self.unjudged.update(row.unjudged_reason or "unknown" for row in missed)

    def trajectories_in_order(self) -> list[Trajectory]:
        """Returns the trajectories of the kept groups, then the unjudged ones."""
        return [trajectory for group in self.groups for trajectory in group.trajectories] + self.unjudged_rows

    def metrics(self, reasons: MetricNames) -> dict[str, float]:
        """Returns the counts, by names of metrics; ``reasons``: those of filters."""
        values = {"drawn": self.drawn, "groups": len(self.groups), "unjudged": self.unjudged.total()}
        values |= {"finished": 0, "truncated": 0, "failed": 0} | self.states | {"dropped": self.dropped.total()}
        for reason, count in self.dropped.items():
            name = f"dropped/{reason if reasons.takes(reason) else 'others'}"
            values[name] = values.get(name, 0) + count
        metrics = {f"rollout/{name}": float(value) for name, value in values.items()}
        episodes = sum(self.states[name] for name in ("finished", "truncated", "failed"))
        if set(self.events) <= {"calls", "rows"} and all(count <= episodes for count in self.events.values()):
            return metrics  # each episode was one call
        return metrics | {f"agent/{name}": count / episodes for name, count in self.events.items()}


@dataclass(slots=True)
class Played:
    """A group whose episodes have finished and are scored."""

    group: Group
    failed: list[Trajectory]
    """One row for each episode that failed."""
    states: Counter[str]
    """Counts of how the episodes ended."""
    kept: bool | None = None
    """True if it belongs in a batch; None: filters have not been asked."""
    reason: str = ""
    """Reason of the filter that refused it."""

    def is_of(self, task: Task) -> bool:
        """Returns True if a group read from a file is of this task; the data may have changed."""
        mine = self.group.task
        same = (mine.source, mine.index) == (task.source, task.index)
        return same and json.dumps(mine.prompt, default=_content) == json.dumps(task.prompt, default=_content)

    def belong_to(self, task: Task, decode: Callable[[Sequence[int]], str]) -> None:
        """Gives a group read from a file its task."""
        self.group.task = task
        for row in (*self.group.trajectories, *self.failed):
            row.task, row.decode = task, decode


def _content(value: Any) -> str:
    return value.key if isinstance(value, Picture) else str(value)


@dataclass(slots=True, eq=False)
class _Playing:
    """A group that is not finished."""

    group_id: str
    since: float
    what: str = "plays"


@dataclass
class Collector:
    """Turns draws into scored groups for one split."""

    episodes: Episodes
    _: KW_ONLY
    n: int
    """Episodes of each group."""
    seed: int
    split: Literal["train", "eval"]
    scoring: Barrier | None = None
    """Barrier that groups pass when they are finished."""

    def __post_init__(self) -> None:
        self.manager, self.settings = self.episodes.manager, self.episodes.settings.rollout
        self.gate = self.episodes.model.engine
        self.open: set[_Playing] = set()
        self.over = 0
        """Number of episodes played plus groups scored."""
        self.groups_over = 0
        self.told: int | None = None
        """The last step of which it was said that trajectories could not be judged."""
        self.judges = judges(self.manager, self.split)
        self.needless = brings_signal(self.manager)
        self.in_order = bool({*self.manager.names("keep_group")} & {*self.manager.names("state_dict")})
        """True if filters must be asked in the order of the draws."""

    async def fill(
        self, draw: Callable[[int], Sequence[Draw]], groups: int, context: ScoreContext, first: int = 0
    ) -> Collected:
        """Collects groups until ``groups`` are kept, in rounds of draws, each replacing what the last one dropped. Raises
        ``RunError`` if too many trajectories are unjudged, or if the refills are used up with nothing kept.

        Args:
            first: number of the first draw in the run.
        """
        collected = Collected(first=first)
        budget = groups * (1 + self.settings.max_refills)
        while len(collected.groups) < groups and collected.drawn < budget:
            wanted = min(groups - len(collected.groups), budget - collected.drawn)
            await self.run(draw(wanted), context, collected)
        refuse_empty(collected)
        return collected

    async def run(self, draws: Sequence[Draw], context: ScoreContext, into: Collected) -> None:
        """Plays and scores the draws; appends kept groups in draw order."""
        for draw in draws:
            self.episodes.agent_key(draw.task)  # an unknown agent is refused before anything starts
        numbers = range(into.drawn, into.drawn + len(draws))
        into.drawn += len(draws)
        opened = [_Playing(f"{self.split}-{context.step}-{number}", time.monotonic()) for number in numbers]
        self.open.update(opened)
        try:
            playing = [self._play(group, draw, context) for group, draw in zip(opened, draws, strict=True)]
            over = await self.watched(side_by_side("scoring a group", playing), len(draws))
        finally:
            self.open.difference_update(opened)
        for number, played in zip(numbers, over, strict=True):
            self.settle(into.first + number, played, into)
        self.check(into, context)

    def check(self, into: Collected, context: ScoreContext) -> None:
        """Says sometimes that trajectories could not be judged, and why. Raises ``NoBatchError`` if they are too many."""
        ended = into.failed.total()
        lost, total = into.unjudged.total() + ended, into.trajectories + ended
        if not lost:
            return
        [(reason, count)] = (into.unjudged + into.failed).most_common(1)
        what, why = f"{lost} of {total} trajectories could not be judged", f"most often: {reason} ({count} times)"
        if lost / total > self.settings.max_unjudged:
            rows = into.trajectories_in_order()
            self.manager.each("log_trajectories", step=context.step, split=self.split, trajectories=rows)
            raise NoBatchError(f"{what} (limit rollout.max_unjudged {self.settings.max_unjudged:g}); {why}", into.draws)
        if self.told is None or context.step - self.told >= REMIND:
            self.told = context.step
            rest = " and are left out" if self.split == "train" else ""
            log.warning("%s, step %d: %s%s; %s", self.split, context.step, what, rest, why)

    def begin(self, group_id: str, draw: Draw, context: ScoreContext) -> asyncio.Task[Played]:
        """Starts playing and scoring a draw's episodes, concurrently with other work."""
        group = _Playing(group_id, time.monotonic())
        self.open.add(group)
        task = asyncio.create_task(self._play(group, draw, context))
        task.add_done_callback(lambda _: self.open.discard(group))  # a task that is cancelled at once never begins
        return task

    async def _play(self, group: _Playing, draw: Draw, context: ScoreContext) -> Played:
        group_id = group.group_id
        seed = episode_seed(self.seed, self.split, draw.task, draw.epoch)
        failed: list[Trajectory] = []
        states = Counter[str]()

        async def play(sample: int) -> list[Trajectory]:
            episode = Episode(f"{group_id}-{sample}", group_id, draw.task, sample=sample, seed=seed, split=self.split)
            try:
                rows = await self.episodes.play(episode)
                states["truncated" if any(row.truncated for row in rows if row.final) else "finished"] += 1
                return rows
            except EpisodeFailed as failure:
                failed.append(self.episodes.failed_row(episode, failure.reason))
                states.update(["failed", *([f"failed/{failure.kind}"] if failure.kind else [])])
                return []
            finally:
                self.over += 1

        try:
            episodes = await side_by_side(f"an episode of the group {group_id}", [play(sample) for sample in range(self.n)])
            trajectories = [trajectory for rows in episodes for trajectory in rows]
            group.since, group.what = time.monotonic(), "is scored"
            async with self.scoring.passing() if self.scoring is not None else nullcontext():
                with span("score"):
                    await score_group(self.manager, self.judges, trajectories, context, self.settings, needless=self.needless)
        finally:
            self.open.discard(group)
        self.over += 1
        self.groups_over += 1
        return Played(Group(group_id, draw.task, trajectories), failed, states)

    async def watched(self, work: Coroutine[Any, Any, T], of: int | None = None) -> T:
        """Returns the result of ``work``. Logs its progress now and then. Warns, then raises, if nothing progresses: no token
        is sampled, no request answered, no episode ends and no group is scored.

        Args:
            of: number of groups.
        """
        before, sampled = self.groups_over, self.episodes.sampled

        def progress() -> str:
            over, tokens = self.groups_over - before, self.episodes.sampled - sampled
            of_all = "" if of is None else f" of {of:,}"
            made = f", {tokens:,} tokens sampled" if tokens else ""
            return f"{'Evaluating' if self.split == 'eval' else 'Sampling'}: {over:,}{of_all} tasks are finished{made}"

        def waiting() -> str:
            now = time.monotonic()
            oldest = sorted(self.open, key=lambda one: one.since)[:SHOWN]
            groups = ", ".join(f"{one.group_id} {one.what} for {now - one.since:.0f} s" for one in oldest)
            more = len(self.open) - len(oldest)
            return "; ".join([f"{groups}{f' and {more} more' if more else ''}" or "no group is open", *self._whom()])

        def moved() -> tuple[int, ...]:
            return self.over, self.episodes.answered, self.episodes.sampled

        own = self.settings.stall_s, lambda: bool(self._at_work()), progress, TELL_S[self.split]
        return await watched(work, moved, waiting, *own)

    def _at_work(self) -> list[str]:
        """Returns the work that is done outside of the host, for people."""
        calls = {f"calls of {hook} are with {key}": count for (key, hook), count in self.manager.awaited.items()}
        work = {f"requests are with {self.episodes.model.engine_name}": self.gate.in_flight, **calls}
        return [f"{count} {what}" for what, count in work.items() if count]

    def _whom(self) -> list[str]:
        """Returns the same, with what waits for new weights, or that nothing is done."""
        nothing = f"no request is with {self.episodes.model.engine_name}, and no plugin is at work"
        held = self.gate.held
        return [*(self._at_work() or [nothing]), *([f"{held} requests wait for new weights"] if held else [])]

    def ask(self, played: Played) -> bool:
        """Returns True if some of the group is judged and no filter refuses it. If filters have a state, call this in the order
        of the draws, so that the result does not depend on timing.
        """
        if played.kept is None:
            judged = self._judged(played.group)
            reason = drop_reason(self.manager, judged) if judged.trajectories and self.split == "train" else None
            played.kept, played.reason = bool(judged.trajectories) and reason is None, reason or ""
        return played.kept

    def settle(self, number: int, played: Played, into: Collected) -> bool:
        """Counts the events of the draw ``number``, and adds its group if it is kept; returns True if so."""
        group, failed = played.group, played.failed
        into.failed += Counter(row.unjudged_reason.removeprefix(FAILED) for row in failed if row.unjudged_reason)
        into.states += played.states
        into.events += counted([*group.trajectories, *failed])
        into.note_unjudged(group.trajectories)
        into.unjudged_rows += failed
        if self.ask(played):
            into.groups.append(self._judged(group))
            outcome = "trained"
        elif played.reason:
            into.dropped[played.reason] += 1
            outcome = f"dropped: {played.reason}"
        else:
            outcome = "unjudged" if group.trajectories else "failed"
        into.draws.append((number, group.task.source, group.task.index, outcome))
        return bool(played.kept)

    def _judged(self, group: Group) -> Group:
        return Group(group.group_id, group.task, [row for row in group.trajectories if row.reward is not None])


def counted(rows: Sequence[Trajectory]) -> Counter[str]:
    """Returns the counts of events in their episodes."""
    counts = Counter(rows=sum(bool(row.actions) for row in rows))
    for row in rows:
        calls = [event for event in row.events if event["kind"] == "call"]
        counts["calls"] += len(calls) if row.events else (row.row == 0) * len(row.actions)
        counts.update(str(call["why"]) for call in calls if call.get("why") not in ("root", "extend", None))
        counts["unreadable"] += sum("problems" in call for call in calls)
        for event in row.events:
            if event["kind"] == "ignored":
                counts.update({f"ignored/{name}": number for name, number in event.get("parameters", {}).items()})
    return +counts


def refuse_empty(collected: Collected) -> None:
    """Raises ``NoBatchError`` if no group was kept."""
    if not collected.groups:
        commonest = (collected.dropped + collected.unjudged).most_common(3)
        reasons = ", ".join(f"{reason} ({count})" for reason, count in commonest)
        raise NoBatchError(f"no group was kept of {collected.drawn} drawn: {reasons}", collected.draws)


def drop_reason(manager: PluginManager, group: Group) -> str | None:
    """Returns why a filter refuses the group; None: no filter does."""
    refusals = ((key, verdict) for key, verdict in manager.each("keep_group", group=group) if verdict is not True)
    return next((verdict.reason if isinstance(verdict, Drop) else key for key, verdict in refusals), None)


async def side_by_side(purpose: str, works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns all results, in order. The first failure cancels the rest, waits for their end, and is raised alone. Raises
    ``RunError`` if something else cancelled a piece of work.
    """
    stray, works = RunError(f"{purpose} was cancelled, and not by the host"), list(works)

    async def guarded(work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except asyncio.CancelledError as error:
            raise (error if asks_to_stop(error) else stray) from None

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(guarded(work)) for work in works]
    except BaseExceptionGroup as failures:
        first: BaseException = failures
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first  # noqa: B904  (its own cause must stay)
    finally:
        for work in works:
            work.close()  # one that was cancelled before it began
    if any(task.cancelled() for task in tasks):
        raise stray
    return [task.result() for task in tasks]
