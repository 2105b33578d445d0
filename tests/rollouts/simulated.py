"""What random schedules are made of: agents, rewards, filters and engines whose times and mistakes are drawn."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rlhf_host import AgentNeeds, Drop, EpisodeFailed, Needs, Reward, RunError, Step, hookimpl
from rlhf_host.engines.requests import Request
from rlhf_host.engines.waves import Waves
from rlhf_host.records.episodes import Generation

VARIETY = ("refills", "stateful filter", "agents", "few at once", "failures", "evaluation", "stateful reward", "interrupts")
"""What half of the schedules have, each."""
BREAKS = ("engine", "filter", "reward", "training")
"""What ends a run in one of ten schedules."""
ON_PURPOSE = "broken on purpose"


class Broken(RunError):
    """What was to end the run."""


@dataclass(frozen=True)
class Mode:
    engine: str
    depth: int = 0
    fixed: bool = False
    in_flight: bool = False
    passed: bool = False
    pool: bool = False


@dataclass
class World:
    """What a schedule draws. Lengths, turns and verdicts depend on ``seed``; times on ``pace`` too."""

    mode: Mode
    seed: int
    pace: int
    exact: bool = False
    """Times are short and nothing depends on them."""
    has: frozenset[str] = frozenset()
    attempts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        draw = random.Random(f"{self.seed}")
        self.has = frozenset(name for name in VARIETY if draw.random() < 0.5)
        if self.exact:
            self.has -= {"few at once", "stateful reward"}
        self.breaks = draw.choice(BREAKS) if draw.random() < 0.1 and not self.exact else None
        self.batch, self.n, self.steps = draw.randint(1, 3), draw.randint(1, 2), draw.randint(2, 5)
        self.tasks, self.max_tokens, self.max_new = draw.randint(2, 9), draw.randint(6, 40), draw.randint(2, 24)
        self.refills, self.kept = draw.randint(3, 9), draw.choice([0.9, 0.6, 0.3])
        self.most = self.mode.depth + draw.randint(1, 3)
        self.unhurried = draw.choice([0.05, 0.5, 5.0])
        self._times = random.Random(f"{self.seed}/{self.pace}")

    def number(self, *of: Any) -> float:
        """In [0, 1), fixed by what it is of."""
        text = f"{self.seed}/{of}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big") / (1 << 48)

    def takes(self, most: float | None = None) -> float:
        """Seconds: mostly nothing or little, sometimes long."""
        short = self._times.random()
        scale = 0.02 if self.exact else most or self.unhurried
        return 0.0 if short < 0.4 else scale * (0.05 if short < 0.8 else self._times.random())

    def count(self, most: int, *of: Any) -> int:
        return 1 + int(self.number(*of) ** 2 * most)

    async def fails(self, where: str, episode_id: str) -> None:
        """Take some time, and fail now and then."""
        if seconds := self.takes():
            await asyncio.sleep(seconds)
        self.attempts[f"{where}/{episode_id}"] += 1
        kind = self.number("fails", where, episode_id, self.attempts[f"{where}/{episode_id}"])
        if "failures" in self.has and kind < 0.1:
            if kind < 0.03:
                raise EpisodeFailed("the sandbox is lost", retryable=kind < 0.02)
            if kind < 0.06:
                raise ValueError("a mistake of the agent's")
            if kind < 0.08 and not self.exact:
                await asyncio.sleep(1000)


class Turns:
    """The host takes turns with it, more with some than with others."""

    def __init__(self, world: World):
        self.world = world

    @hookimpl
    async def agent_reset(self, episode):
        await self.world.fails("reset", episode.episode_id)
        return Step()

    @hookimpl
    async def agent_step(self, episode, action):
        await self.world.fails("step", episode.episode_id)
        turns = self.world.count(5, "turns", episode.seed, episode.sample) if "agents" in self.world.has else 1
        return Step(done=True) if episode.turn + 1 >= turns else Step([3] * self.world.count(6, episode.seed, episode.turn))

    @hookimpl
    async def agent_close(self, episode):
        await asyncio.sleep(self.world.takes(0.02))

    @hookimpl
    def needs(self):
        return AgentNeeds(episodes_at_once=2) if "few at once" in self.world.has else Needs()


class Own(Turns):
    """Asks several things at a time, as it likes."""

    agent_reset = agent_step = None

    @hookimpl
    async def agent_run(self, episode, policy):
        world, ids = self.world, [3, 4]
        for turn in range(world.count(4, "turns", episode.seed, episode.sample)):
            await world.fails("run", episode.episode_id)
            width = 1 if world.exact else world.count(3, "width", episode.seed, episode.sample, turn)
            answers = await asyncio.gather(*(policy.generate(ids) for _ in range(width)))
            if len(ids := [*ids, *answers[0].token_ids, 3]) >= policy.max_tokens:
                break
        return policy.trajectories()


class Judge:
    def __init__(self, world: World):
        self.world, self.seen = world, 0

    @hookimpl
    async def score(self, trajectories):
        await asyncio.sleep(self.world.takes())
        self.seen += 1
        if self.world.breaks == "reward" and self.seen > 6:
            await asyncio.Event().wait()
        number = self.world.number("judged", trajectories[0].task.index)
        if "failures" in self.world.has and number < 0.1:
            raise ConnectionError("the judge is down")
        return [Reward(float(row.action_length)) for row in trajectories]


class CountingJudge(Judge):
    @hookimpl
    def state_dict(self):
        return {"seen": self.seen}

    @hookimpl
    def load_state_dict(self, state):
        self.seen = state["seen"]


class Filter:
    def __init__(self, world: World):
        self.world, self.asked = world, 0

    @hookimpl
    def keep_group(self, group):
        self.asked += 1
        if self.world.breaks == "filter" and self.asked > 6:
            raise Broken(ON_PURPOSE)
        return True if self.world.number("kept", group.trajectories[0].text) < self.world.kept else Drop("odd")


class StatefulFilter(Filter):
    state_dict, load_state_dict = CountingJudge.state_dict, CountingJudge.load_state_dict
    seen = 0


class Free:
    """Decodes every request by itself; new weights come between two tokens."""

    context_length, exact, dead = None, True, False

    def __init__(self, world: World, version: int):
        self.world, self.version, self.asked, self.loading = world, version, 0, asyncio.Lock()

    def expect(self, count: int) -> None:
        assert count >= 0

    async def generate(self, token_ids, sampling, key) -> Generation:
        assert self.world.mode.pool or not self.loading.locked(), "the gate is open while weights come"
        async with self.loading:
            self.asked += 1
        if self.world.breaks == "engine" and self.asked > 9:
            raise Broken(ON_PURPOSE)
        made = self.answer(Request(tuple(token_ids), sampling, key), 7)
        versions: list[int] = []
        while left := len(made.token_ids) - len(versions):
            await asyncio.sleep(self.world.takes(0.5))
            versions += [self.version] * min(left, 8)
        made.versions = versions
        return made

    def answer(self, request: Request, token: int) -> Generation:
        count = self.world.count(self.world.max_new, "length", request.key)
        cut = min(count, request.sampling.max_new_tokens)
        return Generation([token] * cut, [-0.5] * cut, [self.version] * cut, "stop" if cut == count else "length")

    async def sync(self, version: int) -> None:
        async with self.loading:
            await asyncio.sleep(self.world.takes())
            self.version = version

    async def run(self, function: str, version: int) -> None:
        """The same, as an engine in a process of its own gets them."""
        await self.sync(version)

    async def close(self) -> None:
        """Nothing to end."""


class InWaves(Free):
    """``engines.waves`` over a compute thread that takes as long as is drawn. The tokens of an answer say with which others it was
    sampled."""

    def __init__(self, world: World, version: int):
        super().__init__(world, version)
        self.waves = Waves(self._run, self, 1e6)  # so that nothing but the right number of requests begins a wave
        self.expect = self.waves.expect
        self.ends = 0.0

    async def generate(self, token_ids, sampling, key) -> Generation:
        return await self.waves.submit(Request(tuple(token_ids), sampling, key))

    def submit(self, work: Any) -> Future[None]:
        done: Future[None] = Future()
        try:
            work()
        except RunError as error:
            done.set_exception(error)
            return done
        asyncio.get_running_loop().call_later(self.ends, done.set_result, None)
        return done

    def _run(self, requests, finish, dropped) -> None:
        loop, self.ends = asyncio.get_running_loop(), 0.0
        self.asked += len(requests)
        if self.world.breaks == "engine" and self.asked > 9:
            raise Broken(ON_PURPOSE)
        batch = hashlib.blake2b(str(sorted(one.key for one in requests)).encode(), digest_size=3).digest()
        for number, one in enumerate(requests):
            seconds = self.world.takes(0.1)
            self.ends = max(self.ends, seconds)
            answer = self.answer(one, 8 + int.from_bytes(batch, "big") % 1000)
            loop.call_later(seconds, self._finish, finish, number, answer)

    def _finish(self, finish, number: int, answer: Generation) -> None:
        assert answer.versions[0] == self.version, "weights changed under a batch"
        finish([(number, answer)])

    async def close(self) -> None:
        await self.waves.close()
