"""The batch of groups: tasks become episodes, groups are scored as they finish, filters drop, more are drawn."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from rlhf_host.config.schema import RolloutConfig
from rlhf_host.errors import RunError
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.records.episodes import Drop, Episode, EpisodeFailed, Group, Task, Trajectory
from rlhf_host.records.needs import ScoreContext
from rlhf_host.rollouts.episodes import Episodes, episode_seed
from rlhf_host.rollouts.scoring import judges, score_group


@dataclass(slots=True)
class Collected:
    """What a rollout gave: the kept groups in the order their tasks were drawn, and what happened on the way."""

    groups: list[Group] = field(default_factory=list)
    drawn: int = 0
    trajectories: int = 0
    unjudged: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    spoiled: list[Trajectory] = field(default_factory=list)
    """Unjudged trajectories, for the log."""

    def trajectories_in_order(self) -> list[Trajectory]:
        """Those of the kept groups, then the unjudged ones."""
        return [trajectory for group in self.groups for trajectory in group.trajectories] + self.spoiled

    @property
    def lost(self) -> int:
        return self.unjudged.total() + self.failed.total()

    def metrics(self) -> dict[str, float]:
        values = {"rollout/drawn": self.drawn, "rollout/groups": len(self.groups)}
        values |= {"rollout/unjudged": self.unjudged.total(), "rollout/failed": self.failed.total()}
        values |= {"rollout/dropped": self.dropped.total()}
        values |= {f"rollout/dropped/{reason}": count for reason, count in self.dropped.items()}
        return {name: float(value) for name, value in values.items()}


@dataclass(slots=True)
class Draw:
    """A task with the draw that made it: ``epoch`` counts how often its source has been through."""

    task: Task
    epoch: int


class _Open:
    """A group whose episodes are being played."""

    def __init__(self, group_id: str, draw: Draw, n: int):
        self.group_id, self.draw, self.left = group_id, draw, n
        self.found: list[list[Trajectory]] = [[] for _ in range(n)]
        self.kept: Group | None = None


class Collector:
    """Turns draws into scored groups for one split."""

    def __init__(
        self,
        episodes: Episodes,
        manager: PluginManager,
        settings: RolloutConfig,
        *,
        n: int,
        seed: int,
        split: str,
    ):
        self.episodes = episodes
        self.manager = manager
        self.judges = judges(manager, split)
        self.filters = split == "train"
        self.settings = settings
        self.n = n
        self.seed = seed
        self.split = split
        self._live = 0
        self._unfinished = 0

    async def fill(self, draw: Callable[[], Draw], groups: int, context: ScoreContext) -> Collected:
        """Groups until ``groups`` are kept: rounds of draws, each refilling what the last one dropped.

        Raises:
            RunError: when too many trajectories are unjudged, or the refills are used up with nothing kept.
        """
        collected = Collected()
        budget = groups * (1 + self.settings.max_refills)
        while len(collected.groups) < groups and collected.drawn < budget:
            wanted = min(groups - len(collected.groups), budget - collected.drawn)
            await self.run([draw() for _ in range(wanted)], context, collected)
        if not collected.groups:
            reasons = ", ".join(
                f"{reason} ({count})" for reason, count in (collected.dropped + collected.unjudged).most_common(3)
            )
            raise RunError(f"no group was kept of {collected.drawn} drawn: {reasons}")
        return collected

    async def run(self, draws: Sequence[Draw], context: ScoreContext, into: Collected) -> None:
        """Roll out and score the draws; kept groups are appended in draw order."""
        first = into.drawn
        into.drawn += len(draws)
        self._live = self._unfinished = len(draws) * self.n
        self.episodes.engine.expect(self._live)
        opened = [_Open(f"{self.split}-{context.step}-{first + i}", draw, self.n) for i, draw in enumerate(draws)]
        await self._play_all(opened, context, into)
        into.groups.extend(group.kept for group in opened if group.kept is not None)
        lost, total = into.lost, into.trajectories + into.failed.total()
        if total and lost / total > self.settings.max_unjudged:
            reason, count = (into.unjudged + into.failed).most_common(1)[0]
            limit = f"{self.settings.max_unjudged:g}"
            raise RunError(
                f"{lost} of {total} trajectories could not be judged (limit rollout.max_unjudged {limit}); "
                f"most often: {reason} ({count} times)"
            )

    async def _play_all(self, opened: Sequence[_Open], context: ScoreContext, into: Collected) -> None:
        """All episodes side by side; the first failure cancels the others, and it alone says what happened.

        What a ``TaskGroup`` does, without its callback and turn of the loop for every task: there are hundreds in a step.
        """
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        tasks: list[asyncio.Task[None]] = []
        try:
            for group in opened:
                seed = episode_seed(self.seed, self.split, group.draw.task, group.draw.epoch)
                if self.episodes.answers_in_groups(group.draw.task):
                    plays = [partial(self._answer, group, seed, context, into, over)]
                else:
                    plays = [partial(self._play, group, sample, seed, context, into, over) for sample in range(self.n)]
                tasks += [loop.create_task(_watched(play, group.group_id, over)) for play in plays]
            if tasks:
                await over
        except BaseException:
            for task in tasks:
                task.cancel()
            await _all_ended(tasks)
            raise

    async def _play(
        self, group: _Open, sample: int, seed: int, context: ScoreContext, into: Collected, over: asyncio.Future[None]
    ) -> None:
        """One episode."""
        number, task = f"{group.group_id}-{sample}", group.draw.task
        episode = Episode(number, group.group_id, task, sample=sample, seed=seed, split=self.split)  # type: ignore[arg-type]
        try:
            group.found[sample] = await self.episodes.run(episode)
        except EpisodeFailed as failure:
            into.failed[failure.reason] += 1
        finally:
            self._expect_less(1)
        await self._see_to(group, 1, context, into, over)

    async def _answer(
        self, group: _Open, seed: int, context: ScoreContext, into: Collected, over: asyncio.Future[None]
    ) -> None:
        """A group of which every episode is one answer."""
        try:
            answers = await self.episodes.answer(group.group_id, group.draw.task, self.n, seed)
            group.found = [[answer] for answer in answers]
        except EpisodeFailed as failure:
            into.failed[failure.reason] += self.n
        finally:
            self._expect_less(self.n)
        await self._see_to(group, self.n, context, into, over)

    def _expect_less(self, count: int) -> None:
        self._live -= count
        self.episodes.engine.expect(self._live)

    async def _see_to(
        self, group: _Open, ended: int, context: ScoreContext, into: Collected, over: asyncio.Future[None]
    ) -> None:
        """``ended`` more episodes of the group are over: with the last of them it is judged, with the last of all all is over."""
        group.left -= ended
        if not group.left:
            await self._judge(group, context, into)
        self._unfinished -= ended
        if not self._unfinished and not over.done():
            over.set_result(None)

    async def _judge(self, opened: _Open, context: ScoreContext, into: Collected) -> None:
        """Score a group whose episodes are over, and keep it or drop it."""
        trajectories = [trajectory for found in opened.found for trajectory in found]
        into.trajectories += len(trajectories)
        await score_group(self.manager, self.judges, trajectories, context, self.settings)
        judged = [t for t in trajectories if t.reward is not None]
        for trajectory in trajectories:
            if trajectory.reward is None:
                into.unjudged[trajectory.unjudged_reason or "unknown"] += 1
                into.spoiled.append(trajectory)
        if not judged:
            return
        group = Group(opened.group_id, opened.draw.task, judged)
        if self.filters:
            for key, verdict in self.manager.each("keep_group", group=group):
                if verdict is not True:
                    into.dropped[verdict.reason if isinstance(verdict, Drop) else key] += 1
                    return
        opened.kept = group


async def _watched(play: Callable[[], Awaitable[None]], group_id: str, over: asyncio.Future[None]) -> None:
    """A failure ends ``over``."""
    try:
        await play()
    except asyncio.CancelledError:
        if not over.done():
            over.set_exception(RunError(f"an episode of the group {group_id} was cancelled, and not by the host"))
        raise
    except BaseException as error:
        if not over.done():
            over.set_exception(error)
        if not isinstance(error, Exception):
            raise


async def _all_ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for cancelled tasks, which may have something to close, however often this task is cancelled meanwhile."""
    again: asyncio.CancelledError | None = None
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            again = error
    if again is not None:
        raise again
