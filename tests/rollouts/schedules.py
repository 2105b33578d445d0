"""Random schedules of rollouts: the host's own pipeline, admission, gate, waves and pool, over engines, agents and rewards whose
times are drawn. Nothing sleeps: ``virtual_time``."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from rlhf_host import RunError, ScoreContext, Task
from rlhf_host.config.schema import DataConfig, RolloutConfig, RunConfig
from rlhf_host.data.stream import Draw, TaskSet, TaskStream
from rlhf_host.errors import LostError
from rlhf_host.plugins.manager import Loaded, PluginManager
from rlhf_host.records.episodes import Sampling
from rlhf_host.rollouts.admission import Admission, InAdvance
from rlhf_host.rollouts.collect import Collected, Collector
from rlhf_host.rollouts.episode_settings import EpisodeSettings, SampledModel
from rlhf_host.rollouts.episodes import Episodes
from rlhf_host.rollouts.gate import Barrier, Gate
from rlhf_host.rollouts.overtaking import Overtaking
from rlhf_host.rollouts.pipeline import Pipeline
from rlhf_host.training.components import Progress
from rlhf_host.training.loop import Loop
from rlhf_host.training.sampled_rollouts import SampledRollouts

from .playing import INFO
from .simulated import ON_PURPOSE, Broken, CountingJudge, Filter, Free, InWaves, Judge, Mode, Own, StatefulFilter, Turns, World
from .virtual_time import Hang, run

MODES = {
    "rounds": {"engine": "waves"},
    "in-advance": {"engine": "free"},
    "fixed-0": {"engine": "free", "fixed": True},
    "fixed-1": {"engine": "waves", "depth": 1, "fixed": True},
    "fixed-4": {"engine": "waves", "depth": 4, "fixed": True},
    "shared-1": {"engine": "waves", "depth": 1},
    "shared-4": {"engine": "waves", "depth": 4},
    "held-1": {"engine": "free", "depth": 1},
    "held-4": {"engine": "free", "depth": 4},
    "in-flight-1": {"engine": "free", "depth": 1, "in_flight": True},
    "in-flight-4": {"engine": "free", "depth": 4, "in_flight": True},
    "passed-1": {"engine": "free", "depth": 1, "in_flight": True, "passed": True},
    "passed-4": {"engine": "free", "depth": 4, "in_flight": True, "passed": True},
    "pool-1": {"engine": "free", "depth": 1, "in_flight": True, "pool": True},
    "pool-4": {"engine": "free", "depth": 4, "pool": True},
    "pool-waves": {"engine": "waves", "depth": 1, "pool": True},
    "passed-held": {"engine": "waves", "depth": 1, "passed": True},
}
"""How sampling runs ahead. An engine of the sort ``waves`` answers in batches, and without a pool it samples from the trainer's own
module; ``free`` ones answer each request by itself."""


class Life:
    """A process's life of a run: what is built at its start, and the steps that it makes."""

    def __init__(self, world: World, tokenizer: Any, version: int):
        self.world, mode = world, world.mode
        world.attempts.clear()
        agents = [Turns(world), Own(world)] if "agents" in world.has else [Turns(world)]
        judge = (CountingJudge if "stateful reward" in world.has else Judge)(world)
        filters = [(StatefulFilter if "stateful filter" in world.has else Filter)(world)] if "refills" in world.has else []
        loaded = [Loaded("agent", f"agent{number}", INFO, agent) for number, agent in enumerate(agents)]
        loaded += [Loaded("reward", "judge", INFO, judge), *(Loaded("extension", "filter", INFO, one) for one in filters)]
        self.manager = PluginManager(loaded)
        make = partial(InWaves if mode.engine == "waves" else Free, world)
        self.engine = make(version)
        if mode.pool:
            from .simulated_pool import Pool

            self.engine = Pool(world, lambda: make(-1), waves=mode.engine == "waves")
        self.gate = Gate(self.engine)
        self.scoring = Barrier() if mode.depth and "stateful reward" in world.has else None
        self.tokenizer = tokenizer
        names = [f"agent{number}" for number in range(len(agents))]
        self.tasks = [
            Task(
                "12",
                agent=names[int(world.number("agent", i) * len(names))],
                index=i,
                source="made",
                prompt_ids=(3,) * (1 + i % 3),
            )
            for i in range(world.tasks)
        ]
        stream = TaskStream(TaskSet({"made": self.tasks}, {"made": 1.0}), seed=world.seed)
        collector = self._collector("train")
        sizes = world.batch, mode.depth, world.steps, world.batch * (1 + world.refills)
        if mode.engine == "waves" and not mode.depth:
            self.rollouts: Any = SampledRollouts(stream, collector, world.batch)
        else:
            rule = (
                Overtaking(*sizes, max_staleness=world.most)
                if mode.passed
                else (Admission if mode.depth else InAdvance)(*sizes)
            )
            self.rollouts = Pipeline(stream, collector, rule, ScoreContext(), fixed=mode.fixed)
        self.evaluation = self._collector("eval")
        self.pipeline = self.rollouts if isinstance(self.rollouts, Pipeline) else None
        # The loop's own way to bring weights.
        self.loop: Any = Loop.__new__(Loop)
        self.loop.gate, self.loop.in_flight, runtime = self.gate, mode.in_flight, SimpleNamespace(sync=self.engine.sync)
        self.loop.parts = SimpleNamespace(config=RunConfig(), source=self, progress=Progress(version=version), runtime=runtime)

    def _collector(self, split: str) -> Collector:
        world = self.world
        settings = RolloutConfig(max_refills=world.refills, max_unjudged=1.0, step_timeout_s=60.0, episode_timeout_s=300.0)
        model = SampledModel(engine=self.gate, tokenizer=self.tokenizer)
        shared = EpisodeSettings(
            sampling=Sampling(max_new_tokens=world.max_new),
            max_tokens=world.max_tokens,
            data=DataConfig(template="none"),
            rollout=settings,
        )
        episodes = Episodes(self.manager, model, shared)
        return Collector(episodes, n=world.n, seed=7, split=split, scoring=self.scoring)

    def finished(self) -> dict[int, Any]:
        return dict(self.pipeline.finished()) if self.pipeline is not None else {}

    async def position(self) -> tuple[Any, Any]:
        """What a checkpoint of the last step has."""
        if self.scoring is not None:
            await self.scoring.hold()
        noted = self.rollouts.state_dict(), self.finished()
        if self.scoring is not None:
            self.scoring.release()
        return noted

    async def evaluate(self, step: int) -> None:
        if self.pipeline is not None:
            await self.pipeline.wait_until_over()
        collected = Collected()
        await self.evaluation.run([Draw(task, 0) for task in self.tasks[:3]], ScoreContext("eval", step), collected)
        rows = collected.trajectories_in_order()
        assert {version for row in rows for one in row.actions for version in one.versions} <= {
            self.loop.parts.progress.version
        }

    async def step(self, number: int) -> list[Any]:
        """The step's draws, with the tokens and versions of those that are trained."""
        world, loop = self.world, self.loop
        collected = await self.rollouts.next_rollouts(ScoreContext(step=number))
        versions = [v for group in collected.groups for row in group.trajectories for one in row.actions for v in one.versions]
        age = self.pipeline.max_age if self.pipeline is not None else 0
        assert all(0 <= loop.parts.progress.version - version <= age for version in versions), (
            f"older than {age}: {sorted({*versions})}"
        )
        if world.mode.depth and world.mode.engine == "waves" and not world.mode.pool:
            await loop.hold(self.gate)
        await asyncio.sleep(world.takes(world.unhurried * 4))
        if world.breaks == "training" and number == 2:
            raise Broken(ON_PURPOSE)
        loop.parts.progress.version += 1
        await loop.sync()
        rows = {group.task.index: group.trajectories for group in collected.groups}
        tokens = {
            i: [[list(one.token_ids) + list(one.versions) for one in row.actions] for row in of] for i, of in rows.items()
        }
        return [(*draw, tokens.get(draw[2]) if draw[3] == "trained" else None) for draw in collected.draws]

    async def close(self) -> None:
        if self.pipeline is not None:
            await self.pipeline.close()
        await self.engine.close()
        assert not self.rollouts.collector.open
        assert self.gate.expected == 0, f"still expected: {self.gate.expected}"
        self.manager.close()


class Interrupted(Exception):
    pass


@dataclass
class Schedule:
    """A run from its first step to its last, with interrupts on the way."""

    world: World
    tokenizer: Any
    steps: list[list[Any]] = field(default_factory=list)
    positions: list[tuple[Any, Any]] = field(default_factory=list)
    """After each step."""
    lives: int = 0
    hours: float = 0.0

    def times(self) -> Iterator[float]:
        """When it is interrupted: seconds since a life began."""
        draw = random.Random(f"{self.world.seed}/interrupts/{self.world.pace}")
        while "interrupts" in self.world.has and draw.random() < 0.6:
            yield draw.choice([0.05, 1.0, 10.0]) * self.world.unhurried * draw.random()

    async def play(self) -> None:
        for seconds in [*self.times(), None]:
            life = asyncio.create_task(self._live())
            if seconds is not None:
                await asyncio.wait([life], timeout=seconds)
                life.cancel()
            try:
                await life
                break
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise

    async def _live(self) -> None:
        self.lives += 1
        draw = random.Random(f"{self.world.seed}/{self.lives}/{self.world.pace}")
        if self.steps and draw.random() < 0.3:  # it was killed: the newest checkpoint is older
            left = draw.randint(1, len(self.steps))
            del self.steps[left:], self.positions[left:]
        life = Life(self.world, self.tokenizer, len(self.steps))
        try:
            if self.positions:
                life.rollouts.load_state_dict(*self.positions[-1])
            await life.loop.sync()
            while len(self.steps) < self.world.steps:
                number = len(self.steps) + 1
                if "evaluation" in self.world.has and number % 2:
                    await life.evaluate(number - 1)
                step, position = await life.step(number), await life.position()
                self.steps.append(step)
                self.positions.append(position)
        except asyncio.CancelledError:
            self._interrupt(life)
            raise
        finally:
            await life.close()

    def _interrupt(self, life: Life) -> None:
        """What is over meanwhile goes into the checkpoint, unless a batch has it."""
        if self.positions and self.world.mode.depth and life.scoring is None:
            now, then = life.rollouts.state_dict(), self.positions[-1][0]
            if all(now.get(name) == then.get(name) for name in ("ordinal", "passed")):
                self.positions[-1] = then, life.finished()

    def check(self) -> None:
        numbers = [draw[0] for step in self.steps for draw in step]
        assert len({*numbers}) == len(numbers), "a draw was used twice"
        if not self.world.mode.passed:
            assert numbers == [*range(len(numbers))], "in the order of the draws"


def play(mode: str, seed: int, tokenizer: Any, pace: int = 0, *, exact: bool = False) -> tuple[Schedule, str]:
    """A schedule, and how it ended. Raises ``Hang``, also where the host says that nothing moves."""
    schedule = Schedule(World(Mode(**MODES[mode]), seed, pace, exact), tokenizer)
    try:
        run(schedule.play)
    except RunError as error:
        if ON_PURPOSE in str(error):
            return schedule, "broken"
        if "no group was kept" in str(error):
            return schedule, "nothing kept"
        if isinstance(error, LostError):
            return schedule, "engines lost"
        if "no progress in the rollout" in str(error) or "the rollout cannot go on" in str(error):
            raise Hang(str(error)) from error
        raise
    schedule.check()
    return schedule, "finished"
