"""What a pool of engines does when one is slow, or none is left: the actors' own code, without the processes around it."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_host.errors import LostError, RunError
from rlhf_host.records.episodes import Generation, SampleKey, Sampling

pytest.importorskip("ray")

from ray.exceptions import ActorUnavailableError

from rlhf_host.distributed.ray import actors as ray_actors
from rlhf_host.distributed.ray import engine_revival
from rlhf_host.distributed.ray.actors import EngineActor, EngineInfo
from rlhf_host.distributed.ray.engine_pool import AHEAD, EnginePool
from rlhf_host.protocols import Counting, EngineTraits, Update
from rlhf_host.records.tensors import Metric
from rlhf_host.training.components import Progress, RunComponents
from rlhf_host.training.events import EventLoop
from rlhf_host.training.ledger import Ledger
from rlhf_host.training.loop import Loop
from rlhf_host.training.measures import of_engines
from rlhf_host.training.reduction import Metrics
from rlhf_host.training.source import Drawn


@dataclass
class Gated:
    """Decodes two completions together, and none while its gate is shut."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[SampleKey] = field(default_factory=list)
    version: int = 0
    dead: bool = False
    sampled: int = 0

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
async def test_tokens_are_told_before_any_answer_is_finished(monkeypatch):
    """Of all engines together."""
    monkeypatch.setattr(ray_actors, "TELL_S", 0.01)
    engines = [Gated(sampled=10 * number) for number in (1, 2)]
    pool = pool_of(*engines)
    assert (isinstance(pool, Counting), pool.sampled) == (True, 0)
    tasks = ask(pool, groups=2, n=1)
    while pool.sampled < 30:
        await asyncio.sleep(0.01)
    assert not any(task.done() for task in tasks)
    for engine in engines:
        engine.sampled += 1
        engine.gate.set()
    await asyncio.gather(*tasks)
    assert pool.sampled == 32


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
async def test_an_answer_may_have_the_version_that_is_on_its_way_and_no_later_one():
    engine = Gated()
    pool = pool_of(engine)
    pool.coming = 1
    for version, fine in ((1, True), (2, False)):
        (task,) = ask(pool, groups=1, n=1)
        await asyncio.sleep(0.01)
        engine.version = version  # it says so before the sync has returned
        engine.gate.set()
        if fine:
            assert set((await task).versions) == {1}
        else:
            with pytest.raises(RunError, match=r"sampled with weights of the versions \[2\], and was given 1"):
                await task
        engine.gate.clear()


class Changing(Gated):
    """Its functions are ``load``, which takes a version, ``look``, which takes nothing, and ``fail``."""

    async def run(self, function: str, **arguments: Any) -> list[Any]:
        if function == "fail":
            raise RunError("these are not weights")
        self.asked.append((function, arguments.get("version", self.version)))
        await asyncio.sleep(0.01)
        self.version = arguments.get("version", self.version)
        return [len(self.asked)]


@on_a_loop
async def test_weights_of_a_pool_change_between_requests():
    """Requests in flight are answered before, those that come meanwhile after."""
    engines = [Changing(), Changing()]
    pool = pool_of(*engines)
    before = ask(pool, groups=2, n=1)
    await asyncio.sleep(0.01)
    changing = asyncio.ensure_future(pool.run("load", version=7))
    await asyncio.sleep(0.01)
    after = [asyncio.ensure_future(pool.generate([5], Sampling(8), (group, 0, 0))) for group in range(2, 6)]
    await asyncio.sleep(0.01)
    assert [len(engine.asked) for engine in engines] == [1, 1], "neither the function nor a later request"
    with pytest.raises(RunError, match="at work"):
        pool.sleep(keep=True)
    for engine in engines:
        engine.gate.set()
    assert await changing == [2, 2]
    assert [answer.versions for answer in await asyncio.gather(*before, *after)] == [[0]] * 2 + [[7]] * 4
    assert pool.version == 7
    pool.lives.seats[0].engine.version = engines[0].version = -1  # it has started again, and its weights are on their way
    await pool.run("look")
    assert (pool.version, [seat.state for seat in pool.lives.seats]) == (7, ["unsynced", "serving"])
    await pool.run("load", version=3)
    assert [answer.versions for answer in await asyncio.gather(*ask(pool, groups=4, n=1))] == [[3]] * 4


@on_a_loop
async def test_a_function_that_fails_is_raised_and_the_pool_serves_on():
    engine = Changing()
    engine.gate.set()
    pool = pool_of(engine)
    with pytest.raises(RunError, match="these are not weights"):
        await pool.run("fail")
    assert (await pool.generate([5], Sampling(8), (0, 0, 0))).versions == [0]


@pytest.mark.parametrize("asleep", [False, True])
@on_a_loop
async def test_an_engine_that_starts_again_gets_the_weights_that_were_changed_last(monkeypatch, asleep):
    """Not what ran last, and not before engines are awake, where others may have the memory."""
    monkeypatch.setattr(engine_revival, "RETRY_S", 0.001)

    class Again(EngineActor):
        async def start(self, setup, threads, gpus):
            self.engine = Changing()
            self.engine.gate.set()
            return EngineInfo(self.life, 0, None, True, 0)

        async def sleep(self, keep):
            return self.engine.version

    engines = [Changing(), Changing()]
    pool = pool_of(*engines, actor_class=Again)
    await pool.run("load", version=4)
    await pool.run("look")
    pool._asleep = asleep
    pool.before_sampling = lambda: setattr(pool, "_asleep", False)
    seat = pool.lives.seats[0]
    pool.lives.report_lost(seat.engine)
    while seat.engine is None:
        await asyncio.sleep(0.001)
    again = seat.actor.actor.engine
    assert again is not engines[0]
    if asleep:
        await asyncio.sleep(0.1)
        assert (again.asked, seat.state) == ([], "unsynced")
        await pool.awake()
    while seat.state != "serving":
        await asyncio.sleep(0.001)
    assert again.asked == [("load", 4)]
    assert ("look", 4) in engines[1].asked
    await pool.close()


@on_a_loop
async def test_a_change_waits_for_an_engine_that_is_started_again(monkeypatch):
    monkeypatch.setattr(engine_revival, "RETRY_S", 0.001)

    class Late(EngineActor):
        async def start(self, setup, threads, gpus):
            await asyncio.sleep(0.1)
            self.engine = Changing()
            return EngineInfo(self.life, 0, None, True, 0)

    pool = pool_of(Changing(), actor_class=Late)
    pool.lives.report_lost(pool.lives.seats[0].engine)
    assert await pool.run("load", version=4) == [1]
    assert (pool.version, pool.lives.seats[0].state) == (4, "serving")
    await asyncio.sleep(0.1)
    assert pool.lives.seats[0].actor.actor.engine.asked == [("load", 4)], "once, though it has started again"
    pool.lives.seats[0].state, pool.lives.seats[0].engine = "gone", None
    with pytest.raises(LostError, match="no engine is left"):
        await pool.run("load", version=5)
    await pool.close()


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


@on_a_loop
async def test_a_request_that_is_aborted_before_it_began_is_answered():
    """Nobody waits for it; but the actor's caller waits for an answer to each, and an engine for as many requests as are open."""
    engine = Gated()
    actor = EngineActor()
    actor.engine = engine
    answers = actor.generate(actor.life, [(1, SimpleNamespace(token_ids=(5,), sampling=Sampling(8), key=(0, 0, 0)))])
    asked = asyncio.ensure_future(anext(answers))
    while not actor.open:
        await asyncio.sleep(0)
    actor.open[1].cancel()  # in the turn of the loop in which it was made
    _, [(number, answer)] = await asyncio.wait_for(asked, 1)
    assert (number, str(answer), actor.open, engine.asked) == (1, "aborted", {}, [])


@on_a_loop
async def test_requests_that_fail_leave_their_places_to_those_that_wait():
    class First(Gated):
        async def generate(self, token_ids, sampling, key) -> Generation:
            if key[0] == 0:
                raise ValueError("these are too long")
            return await super().generate(token_ids, sampling, key)

    class Breaking(EngineActor):
        async def generate(self, life, batch):
            if any(request.key[0] == 0 for _, request in batch):
                raise RunError("the call itself failed")
            async for answers in super().generate(life, batch):
                yield answers

    engine = Gated()
    engine.gate.set()
    pool = pool_of(engine, actor_class=Breaking)
    full = AHEAD * TRAITS.largest_batch
    failing, waiting = ask(pool, groups=1, n=full), asyncio.ensure_future(pool.generate([5], Sampling(8), (1, 0, 0)))
    for task in failing:
        with pytest.raises(RunError, match="the call itself failed"):
            await task
    assert (await asyncio.wait_for(waiting, 1)).token_ids == [7]


@on_a_loop
async def test_a_start_that_fails_in_an_unforeseen_way_ends_the_wait_for_it():
    class Odd(EngineActor):
        async def start(self, setup, threads, gpus):
            raise OSError("no space left on device")

    pool = pool_of(Gated(), actor_class=Odd)
    [task] = ask(pool, groups=1, n=1)
    await asyncio.sleep(0.01)
    pool.lives.report_lost(pool.lives.targets[0].engine)
    with pytest.raises(LostError, match="no engine is left: no space left on device"):
        await asyncio.wait_for(task, 1)


@on_a_loop
async def test_an_answer_that_nobody_can_read_fails_its_requests():
    class Odd(EngineActor):
        async def generate(self, life, batch):
            yield 0, [number for number, _ in batch]

    [task] = ask(pool_of(Gated(), actor_class=Odd), groups=1, n=1)
    with pytest.raises(TypeError, match="unpack"):
        await asyncio.wait_for(task, 1)


class Timed(Gated):
    """Takes as long as a script says, and writes down when."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.times = iter(seconds), []

    async def generate(self, token_ids, sampling, key) -> Generation:
        self.times.append((time.perf_counter(), math.inf))
        place = len(self.times) - 1
        await asyncio.sleep(next(self.seconds))
        self.times[place] = (self.times[place][0], time.perf_counter())
        return Generation([7], [-0.5], [self.version], "stop")

    async def metrics(self):
        return [Metric("kv_use", 0.25 * len(self.times), reduce="max"), Metric("preemptions", len(self.times), reduce="sum")]


def seconds_within(spans, start: float, end: float) -> float:
    """How much of the time from ``start`` to ``end`` is in a span."""
    covered, at = 0.0, start
    for first, last in sorted(spans):
        first, last = max(first, at), min(last, end)
        if last > first:
            covered, at = covered + last - first, last
    return covered


WATCHED_S = 0.04
"""Between what a step measures and what is measured around it, a busy machine may do something else."""


def test_busy_and_idle_add_up_to_the_step(tmp_path):
    """Two engines and a trainer that write down when they worked; engines go on while the trainer computes."""
    engines = [Timed([0.03, 0.2, 0.01, 0.06, 0.15, 0.04] * 2), Timed([0.05, 0.02, 0.12, 0.03, 0.08, 0.1] * 2)]
    computing = []

    class Trainer:
        compute_s = 0.0

        def update(self, batch, *, sampled_now):
            started = time.perf_counter()
            time.sleep(0.07)
            computing.append((started, time.perf_counter()))
            self.compute_s += computing[-1][1] - started
            metrics = Metrics()
            metrics.add([Metric("loss", 0.0)])
            return Update(metrics)

    with EventLoop() as events:

        async def start():
            return pool_of(*engines)

        async def answers(count):
            return await asyncio.gather(*open_requests[:count])

        async def begin(group):
            open_requests.append(asyncio.ensure_future(pool.generate([5, 6], Sampling(8), (group, 0, 0))))

        pool, open_requests = events.run(start()), []

        class Source:
            steps = None

            def draw(self, step, version):
                """The next two answers; two more are asked for meanwhile, but for the last."""
                for group in range(len(open_requests), 2 * min(step + 1, 4)):
                    events.run(begin(group))
                events.run(answers(2 * step))
                time.sleep(0.02)
                mask = torch.ones(2, 4, dtype=torch.bool)
                batch = SimpleNamespace(action_mask=mask, loss_mask=mask)
                return Drawn(batch, [], sampled=True)

        train = SimpleNamespace(epochs=1, minibatches=1, on_nonfinite="stop")
        parts = RunComponents(
            config=SimpleNamespace(async_depth=1, train=train, seed=0),
            manager=SimpleNamespace(report=lambda *_, **__: None),
            needs=SimpleNamespace(roles=()),
            runtime=SimpleNamespace(trainer=Trainer(), engine=pool, targets=()),
            bring=None,
            source=Source(),
            events=events,
            run_dir=tmp_path,
            progress=Progress(),
            ledger=Ledger(tmp_path),
        )
        loop = Loop(parts=parts, keeper=SimpleNamespace(forget=lambda: None, waited_s=0.0), evaluate=None, planned=4)
        for number in range(1, 5):
            started = time.perf_counter()
            row = loop._take_step(number)
            ended = time.perf_counter()
            generating = [span for engine in engines for span in engine.times]
            busy = seconds_within(generating, started, ended)
            assert row["time/step"] == pytest.approx(ended - started, abs=WATCHED_S)
            assert busy + row["time/idle_engines"] == pytest.approx(ended - started, abs=WATCHED_S)
            assert seconds_within(computing, started, ended) + row["time/idle_trainer"] == pytest.approx(
                ended - started, abs=WATCHED_S
            )
        assert row["time/idle_engines"] > 0.05
        assert row["time/idle_trainer"] > 0.02
        events.run(pool.close())


def test_an_engine_that_has_died_keeps_no_other_from_sleeping_and_waking(monkeypatch):
    dead, done = set(), []

    def wait_all(references, *names):
        if dead.intersection(references):
            raise LostError("it is gone")
        return references

    class Process:
        def __init__(self, name):
            self.sleep = SimpleNamespace(remote=lambda keep: done.append(("sleep", name)) or name)
            self.wake = SimpleNamespace(remote=lambda weights_only: done.append(("wake", name)) or name)

    monkeypatch.setattr("rlhf_host.distributed.ray.engine_pool.wait_all", wait_all)
    pool = EnginePool([(str(number), Process(number), ()) for number in range(2)], TRAITS)
    pool.lives.start(EngineInfo(str(number), 0, None, True, 0) for number in range(2))
    dead.add(0)
    pool.sleep(keep=False)
    pool.wake()
    assert done == [("sleep", 0), ("sleep", 1), ("wake", 0), ("wake", 1)]
    dead.add(1)
    with pytest.raises(LostError, match="it is gone"):
        pool.sleep(keep=False)


@on_a_loop
async def test_engines_are_measured_together():
    engines = [Timed([0.001] * 9), Timed([0.001] * 9)]
    pool = pool_of(*engines)
    await asyncio.gather(*ask(pool, groups=6, n=1))
    counts = [len(engine.times) for engine in engines]
    runtime = SimpleNamespace(engine=pool, targets=())
    measured = await of_engines(runtime, None)
    assert measured["engine/preemptions"] == sum(counts) == 6
    assert measured["engine/kv_use"] == 0.25 * max(counts)
    assert measured["engine/rss_gb"] > 0.1
    pool.lives.seats[0].actor.actor.life = "another"
    assert (await of_engines(runtime, None))["engine/preemptions"] == counts[1]
