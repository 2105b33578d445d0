"""The batch of groups: tasks become episodes, groups are scored as they finish, filters drop, more are drawn."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rlhf_host.config.schema import RolloutConfig
from rlhf_host.errors import RunError
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.rollouts.episodes import Episodes, episode_seed
from rlhf_host.rollouts.scoring import judges, score_group
from rlhf_host.types import Drop, Episode, EpisodeFailed, Group, ScoreContext, Task, Trajectory


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
        with _no_collection():
            await self._run(draws, context, into)

    async def _run(self, draws: Sequence[Draw], context: ScoreContext, into: Collected) -> None:
        first = into.drawn
        into.drawn += len(draws)
        self._live = len(draws) * self.n
        self.episodes.engine.expect(self._live)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._group(draw, first + i, context, into)) for i, draw in enumerate(draws)]
        except* Exception as errors:
            # The first failure has cancelled the others; it alone says what happened.
            raise errors.exceptions[0] from errors
        into.groups.extend(group for group in (task.result() for task in running) if group is not None)
        lost, total = into.lost, into.trajectories + into.failed.total()
        if total and lost / total > self.settings.max_unjudged:
            reason, count = (into.unjudged + into.failed).most_common(1)[0]
            limit = f"{self.settings.max_unjudged:g}"
            raise RunError(
                f"{lost} of {total} trajectories could not be judged (limit rollout.max_unjudged {limit}); "
                f"most often: {reason} ({count} times)"
            )

    async def _group(self, draw: Draw, number: int, context: ScoreContext, into: Collected) -> Group | None:
        task = draw.task
        group_id = f"{self.split}-{context.step}-{number}"
        seed = episode_seed(self.seed, self.split, task, draw.epoch)
        episodes = [
            Episode(f"{group_id}-{sample}", group_id, task, sample=sample, seed=seed, split=self.split)  # type: ignore[arg-type]
            for sample in range(self.n)
        ]
        try:
            async with asyncio.TaskGroup() as tasks:
                results = [tasks.create_task(self._episode(episode, into)) for episode in episodes]
        except* Exception as errors:
            raise errors.exceptions[0] from errors
        trajectories = [trajectory for result in results for trajectory in result.result()]
        into.trajectories += len(trajectories)
        await score_group(self.manager, self.judges, trajectories, context, self.settings)
        judged = [t for t in trajectories if t.reward is not None]
        for trajectory in trajectories:
            if trajectory.reward is None:
                into.unjudged[trajectory.unjudged_reason or "unknown"] += 1
                into.spoiled.append(trajectory)
        if not judged:
            return None
        group = Group(group_id, task, judged)
        if self.filters:
            for key, verdict in self.manager.each("keep_group", group=group):
                if verdict is not True:
                    into.dropped[verdict.reason if isinstance(verdict, Drop) else key] += 1
                    return None
        return group

    async def _episode(self, episode: Episode, into: Collected) -> list[Trajectory]:
        try:
            return await self.episodes.run(episode)
        except EpisodeFailed as failure:
            into.failed[failure.reason] += 1
            return []
        finally:
            self._live -= 1
            self.episodes.engine.expect(self._live)


@contextmanager
def _no_collection() -> Iterator[None]:
    """A rollout only makes objects that stay; looking through them again and again for cycles doubles its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
