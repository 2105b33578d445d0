"""What a pool of engines does when one is slow, or none is left: the actors' own code, without the processes around it."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_host.errors import LostError
from rlhf_host.records.episodes import Generation, SampleKey, Sampling

pytest.importorskip("ray")

from ray.exceptions import ActorUnavailableError

from rlhf_host.protocols import EngineTraits
from rlhf_host.runtimes import engine_revival
from rlhf_host.runtimes.engine_pool import AHEAD, EnginePool
from rlhf_host.runtimes.ray_actors import EngineActor, EngineInfo


@dataclass
class Gated:
    """Decodes two completions together, and none while its gate is shut."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[SampleKey] = field(default_factory=list)
    version: int = 0
    dead: bool = False

    def expect(self, count: int) -> None:
        pass

    async def generate(self, token_ids, sampling, key) -> Generation:
        self.asked.append(key)
        await self.gate.wait()
        return Generation([7], [-0.5], [self.version], "stop")

    async def close(self) -> None:
        pass


TRAITS = EngineTraits(largest_batch=2)


class Here:
    """A handle to an actor of this process; its methods are called as Ray's are."""

    def __init__(self, actor: Any):
        self.actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.actor, name)
        remote = (lambda *given: references(method(*given))) if name == "generate" else method
        return SimpleNamespace(remote=remote, options=lambda **_: SimpleNamespace(remote=remote))


async def references(answers):
    async for answer in answers:
        yield asyncio.sleep(0, answer)


class Gone(EngineActor):
    """Its machine is lost, and Ray has none to start it on."""

    async def start(self, setup, threads, gpus):
        raise ActorUnavailableError("the actor is restarting", None)


def pool_of(*engines: Gated, actor_class: type[EngineActor] = EngineActor, **settings: float) -> EnginePool:
    actors = []
    for engine in engines:
        actors.append(actor_class())
        actors[-1].engine = engine
    pool = EnginePool([(str(i), Here(actor), (None, 0, None)) for i, actor in enumerate(actors)], TRAITS, **settings)
    pool.lives.start(EngineInfo(actor.life, 0, None, True, 0) for actor in actors)
    pool.synced(0)
    return pool


def ask(pool: EnginePool, groups: int, n: int) -> list[asyncio.Task[Generation]]:
    asked = [(group, sample, 0) for group in range(groups) for sample in range(n)]
    return [asyncio.ensure_future(pool.generate([5, 6], Sampling(8), key)) for key in asked]


async def count(tasks, wanted: int) -> None:
    """Wait until so many are answered."""
    while sum(task.done() for task in tasks) < wanted:
        await asyncio.sleep(0.001)


def on_a_loop(test):
    @functools.wraps(test)
    def run(**fixtures):
        asyncio.run(asyncio.wait_for(test(**fixtures), 20))

    return run


@on_a_loop
async def test_an_engine_that_stands_still_holds_up_nothing_but_what_it_was_given():
    slow, *others = engines = [Gated() for _ in range(3)]
    for engine in others:
        engine.gate.set()
    pool = pool_of(*engines)
    tasks = ask(pool, groups=20, n=2)
    given = AHEAD * TRAITS.largest_batch
    await count(tasks, len(tasks) - given)
    assert len(slow.asked) == given
    # What comes meanwhile goes to those that are free.
    tasks += [asyncio.ensure_future(pool.generate([5, 6], Sampling(8), (20 + i, 0, 0))) for i in range(4)]
    await count(tasks, len(tasks) - given)
    assert len(slow.asked) == given
    slow.gate.set()
    await asyncio.gather(*tasks)
    keys = [key for engine in engines for key in engine.asked]
    assert len(set(keys)) == len(keys) == len(tasks)
    homes = {group: {i for i, engine in enumerate(engines) if group in {key[0] for key in engine.asked}} for group in range(24)}
    assert {len(home) for home in homes.values()} == {1}  # a group's prompt is computed by one engine


@on_a_loop
async def test_long_requests_weigh_more_than_many_short_ones():
    engines = [Gated(), Gated()]
    pool = pool_of(*engines)
    long = asyncio.ensure_future(pool.generate([5] * 50, Sampling(400), (0, 0, 0)))
    await asyncio.sleep(0.01)
    short = [asyncio.ensure_future(pool.generate([5], Sampling(8), (i, 0, 0))) for i in range(1, 5)]
    await asyncio.sleep(0.01)
    assert sorted(len(engine.asked) for engine in engines) == [1, 4]
    for engine in engines:
        engine.gate.set()
    await asyncio.gather(long, *short)


@on_a_loop
async def test_without_any_machine_for_the_last_engine_the_run_ends(monkeypatch, caplog):
    monkeypatch.setattr(engine_revival, "RETRY_S", 0.001)
    monkeypatch.setattr(engine_revival, "MOVE_S", 0.0)
    engines = [Gated(), Gated()]
    pool = pool_of(*engines, actor_class=Gone, wait_s=0.01)
    pool.lives.homeless = lambda name: True
    tasks = ask(pool, groups=2, n=1)
    await asyncio.sleep(0.01)
    first, second = (target.engine for target in pool.lives.targets)
    pool.lives.report_lost(first)
    while "the run goes on with 1 of 2 until one joins" not in caplog.text:
        await asyncio.sleep(0.001)
    assert not any(task.done() for task in tasks)
    pool.lives.report_lost(second)
    for task in tasks:
        with pytest.raises(LostError, match="no engine is left: no machine has had room for it"):
            await task
    await pool.close()
