"""Sharing of devices: who must be on them for what, counted in bytes by stand-ins for engines and workers."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from rlhf_host.distributed.ray import device_phases, engine_pool
from rlhf_host.distributed.ray.actors import EngineActor, EngineInfo
from rlhf_host.distributed.ray.device_phases import DevicePhases
from rlhf_host.distributed.ray.engine_pool import EnginePool
from rlhf_host.distributed.ray.runtime import RayRuntime, RemoteSource
from rlhf_host.errors import RunError
from rlhf_host.protocols import NO_WEIGHTS, EngineTraits, SyncTarget
from rlhf_host.records.episodes import Generation, Sampling
from rlhf_host.weight_sync.bring import Bring, Probe

WEIGHTS, CACHE, HELD, TRAINING, BUCKET = 15, 40, 42, 66, 1


class Device:
    """Memory that trainer and engine share; knows its fullest moment, and when that was."""

    def __init__(self) -> None:
        self.used: dict[str, int] = {}
        self.moments: list[tuple[str, int]] = []

    def take(self, what: str, size: int) -> None:
        self.used[what] = size
        self.moments.append((what, sum(self.used.values())))

    def free(self, *what: str) -> None:
        for each in what:
            self.used.pop(each, None)

    @property
    def peak(self) -> int:
        return max(size for _, size in self.moments)


@dataclass
class Counted:
    """An engine that only takes memory."""

    device: Device
    version: int = NO_WEIGHTS
    dead: bool = False
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device.take("weights", WEIGHTS)
        self.device.take("cache", CACHE)

    def expect(self, count: int) -> None:
        pass

    async def sleep(self) -> None:
        self.calls.append("sleep")
        self.device.free("weights", "cache")

    async def wake(self) -> None:
        self.calls.append("wake")
        self.device.take("weights", WEIGHTS)
        self.device.take("cache", CACHE)

    async def generate(self, token_ids, sampling, key) -> Generation:
        if "cache" not in self.device.used or self.version == NO_WEIGHTS:
            raise RunError("engine counted is asleep: wake() it before it generates")
        return Generation([7], [-0.5], [self.version], "stop")

    async def run(self, function: str, **arguments: Any) -> list[Any]:
        assert "weights" in self.device.used
        for _ in range(3):
            self.device.take("bucket 1", BUCKET)
            self.device.take("bucket 2", BUCKET)
        self.device.free("bucket 1", "bucket 2")
        self.version = arguments["version"]
        return [None]


class InParts(Counted):
    async def sleep_empty(self) -> None:
        self.calls.append("sleep empty")
        self.device.free("weights", "cache")
        self.version = NO_WEIGHTS

    async def wake_weights(self) -> None:
        self.calls.append("wake weights")
        self.device.take("weights", WEIGHTS)


class Workers:
    """A group whose training data is moved."""

    name = "actor"

    def __init__(self, devices: list[Device]):
        self.devices = devices

    def load(self) -> None:
        for device in self.devices:
            device.take("trainer", HELD)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        if method != "of_backends":
            return [asyncio.sleep(0, dict(device.used)) for device in self.devices]
        for device in self.devices:
            if arguments == ("reload",):
                device.take("trainer", HELD)
            else:
                device.free("trainer")
        return [None for _ in self.devices]

    def train(self) -> None:
        for device in self.devices:
            device.take("trainer", TRAINING)
            device.take("trainer", HELD)


class Here:
    """A handle to an actor of this process."""

    def __init__(self, actor: EngineActor):
        self.actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.actor, name)
        return SimpleNamespace(remote=method)


def waited(references, *names, within_s=None):
    return [answer_of(each) if inspect.iscoroutine(each) else each for each in references]


def answer_of(call):
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(asyncio.run(call)))
    thread.start()
    thread.join()
    return answers[0]


class Sync:
    async def connect(self, targets: list[SyncTarget]) -> None:
        self.targets = targets

    async def send(self, source: Any, version: int) -> None:
        for target in self.targets:
            await target.engine.run("weights", version=version)

    async def close(self) -> None:
        pass


class House:
    """Two devices, each with an engine and a worker, from the start of a run to its end; everything but the memory is real."""

    def __init__(self, kind: type[Counted], verify: str):
        self.devices = [Device(), Device()]
        self.workers = Workers(self.devices)
        self.engines = [kind(device) for device in self.devices]
        self.pool = pool_of(self.engines)
        self.pool.sleep(keep=False)
        self.workers.load()
        self.phases = DevicePhases([self.pool], [self.workers])
        self.pool.before_sampling = self.phases.sample
        self.runtime = RayRuntime.__new__(RayRuntime)
        self.runtime.pools, self.runtime.followers = {"rollout": self.pool}, [self.pool]
        self.runtime._phases, self.runtime.source = self.phases, None
        self.runtime._lock, self.runtime._version = asyncio.Lock(), NO_WEIGHTS
        self.runtime.trainer = SimpleNamespace(ahead=False, still=threading.Lock(), trained=[])
        self.pool.resync = self.runtime._resync
        self.asked: list[int] = []
        self.runtime._bring = Bring(
            Sync(), "sync", verify, Tokenizer(), 1.0, lambda: Probe(self.logprobs, context_length=64, exact=True)
        )

    async def logprobs(self, trajectories) -> list[list[float]]:
        """The actor's, of a probe: the trainer computes."""
        self.asked.append(len(trajectories))
        await asyncio.to_thread(self.phases.train)
        self.workers.train()
        return [[-0.5] for _ in trajectories]

    async def step(self, version: int) -> None:
        await asyncio.to_thread(self.phases.train)
        self.workers.train()
        self.runtime.trainer.ahead = True
        await self.runtime.sync(version)

    async def sample(self) -> Generation:
        return await self.pool.generate([5, 6], Sampling(8), (0, 0, 0))

    def peak(self) -> int:
        return max(device.peak for device in self.devices)

    def add_opponent(self) -> EnginePool:
        """Adds an engine of a frozen role on the first device, whose memory is not counted."""
        engine = InParts(Device(), version=0)
        pool = pool_of([engine], 0)
        pool.lives.keeps = True
        self.phases._engines = [self.pool, pool]
        pool.before_sampling = self.phases.sample
        pool.synced(0)
        self.runtime.pools["opponent"] = pool
        return pool


def pool_of(engines: Sequence[Counted], version: int = NO_WEIGHTS) -> EnginePool:
    actors = []
    for engine in engines:
        actor = EngineActor()
        actor.engine = engine
        actors.append(actor)
    pool = EnginePool([(str(i), Here(each), ()) for i, each in enumerate(actors)], EngineTraits(sleeps=True))
    pool.lives.start(EngineInfo(each.life, version, None, True, 0) for each in actors)
    return pool


class Tokenizer:
    all_special_ids: tuple[int, ...] = ()

    def __len__(self) -> int:
        return 64


@pytest.fixture
def house(monkeypatch):
    monkeypatch.setattr(engine_pool, "wait_all", waited)
    monkeypatch.setattr(device_phases, "wait_all", waited)
    # Streams of answers are Ray's; the engine is asked itself.
    monkeypatch.setattr(EnginePool, "_send", answered)
    return House


def answered(pool, seat, engine, tickets):
    async def answer():
        for ticket in tickets:
            request = ticket.content.request
            generation = await seat.actor.actor.engine.generate(request.token_ids, request.sampling, request.key)
            pool._take(seat, engine, [(ticket.number, generation)])

    pool._readers.add(asyncio.ensure_future(answer()))


def test_no_moment_needs_more_than_the_larger_side_and_two_buckets(house):
    """From the start of the engines on; the order of calls is that of the phases."""

    async def main():
        run = house(InParts, "off")
        for version in range(3):
            await (run.runtime.sync(0) if not version else run.step(version))
            assert (await run.sample()).versions == [version]
        return run

    run = asyncio.run(main())
    assert run.peak() == max(TRAINING, WEIGHTS + HELD + 2 * BUCKET, WEIGHTS + CACHE) == TRAINING
    calls = ["sleep empty", "wake weights", "wake"] * 3
    assert [engine.calls for engine in run.engines] == [calls, calls]
    device = run.devices[0]
    sync = max(size for what, size in device.moments if what.startswith("bucket"))
    assert sync == WEIGHTS + HELD + 2 * BUCKET, "no cache while weights travel"


def test_an_engine_without_parts_keeps_its_weights_and_wakes_whole(house):
    async def main():
        run = house(Counted, "off")
        for version in range(2):
            await (run.runtime.sync(0) if not version else run.step(version))
            assert (await run.sample()).versions == [version]
        return run

    run = asyncio.run(main())
    assert run.peak() == WEIGHTS + CACHE + HELD + 2 * BUCKET
    assert run.engines[0].calls == ["sleep", "wake", "wake"] * 2


@pytest.mark.parametrize("kind", [Counted, InParts])
def test_engines_that_sleep_are_compared_together_and_wake_for_it(house, kind):
    """One pass of the trainer for both; it is never beside a cache."""

    async def main():
        run = house(kind, "on")
        for version in range(2):
            await (run.runtime.sync(0) if not version else run.step(version))
            assert (await run.sample()).versions == [version]
        return run

    run = asyncio.run(main())
    assert run.asked == [2, 2], "trajectories of a pass: one of each engine"
    assert all(engine.version == 1 for engine in run.engines)
    if kind is InParts:
        assert run.peak() == TRAINING
        assert run.engines[0].calls == ["sleep empty", "wake weights", "wake", "sleep", "wake"] * 2


def test_engines_that_slept_without_weights_get_them_again_before_they_sample(house):
    """A checkpoint or a pass of the trainer may come between a sync and its rollout."""

    async def main():
        run = house(InParts, "off")
        await run.runtime.sync(0)
        await asyncio.to_thread(run.phases.train)
        assert [engine.version for engine in run.engines] == [NO_WEIGHTS] * 2
        answers = await asyncio.gather(*(run.sample() for _ in range(3)))
        return run, answers

    run, answers = asyncio.run(asyncio.wait_for(main(), 20))
    assert [answer.versions for answer in answers] == [[0]] * 3
    assert run.peak() == WEIGHTS + HELD + 2 * BUCKET


@pytest.mark.parametrize("at_work", [False, True])
def test_whoever_wakes_others_leaves_those_without_weights_to_their_sync(house, at_work):
    """An opponent that is asked first, or gets the weights of a saved step, after a checkpoint has put all engines to sleep."""

    async def main():
        run = house(InParts, "off")
        opponent = run.add_opponent()
        await run.runtime.sync(0)
        await asyncio.to_thread(run.phases.train)
        assert [engine.version for engine in run.engines] == [NO_WEIGHTS] * 2
        await opponent.generate([5, 6], Sampling(8), (1, 0, 0))
        assert all("cache" not in device.used for device in run.devices)
        if at_work:
            lane = opponent.lives.seats[0].lane
            lane.sent[0] = None  # a request in flight
            asyncio.get_running_loop().call_later(0.2, lane.sent.clear)
        answers = await asyncio.gather(*(run.sample() for _ in range(3)))
        return run, answers

    run, answers = asyncio.run(asyncio.wait_for(main(), 20))
    assert [answer.versions for answer in answers] == [[0]] * 3
    assert run.peak() == WEIGHTS + HELD + 2 * BUCKET


def test_between_an_update_and_its_sync_requests_wait(house):
    async def main():
        run = house(InParts, "off")
        await run.runtime.sync(0)
        await asyncio.to_thread(run.phases.train)
        run.runtime.trainer.ahead = True
        asked = asyncio.ensure_future(run.sample())
        done, _ = await asyncio.wait([asked], timeout=1)  # an engine that may answer does so in a moment
        assert not done
        await run.runtime.sync(1)
        return await asked

    assert asyncio.run(asyncio.wait_for(main(), 20)).versions == [1]


def test_an_engine_starts_again_where_the_trainer_is_away(house):
    async def main():
        run = house(InParts, "off")
        await run.runtime.sync(0)
        await asyncio.to_thread(run.phases.train)
        async with run.phases.restart():
            assert "trainer" not in run.devices[0].used
            training = asyncio.ensure_future(asyncio.to_thread(run.phases.train))
            await asyncio.sleep(0.05)
            assert not training.done()
        await training
        assert run.devices[0].used == {"trainer": HELD}

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_function_beside_the_trainers_weights_finds_them_on_the_device(house):
    """Between the steps, where engines have slept since or not; in a sync they are there already, beside those of engines."""

    async def main():
        run = house(InParts, "off")
        source = RemoteSource(run.workers, run.phases.back)
        await run.runtime.sync(0)
        assert "trainer" not in run.devices[0].used
        assert await source.run("save") == [{"trainer": HELD}] * 2
        await asyncio.to_thread(run.phases.send)
        assert await source.run("save") == [{"trainer": HELD, "weights": WEIGHTS}] * 2

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("shared", [True, False])
def test_workers_are_on_their_devices_before_they_copy_what_a_checkpoint_gets(monkeypatch, shared):
    done = []
    monkeypatch.setattr(RayRuntime, "_everywhere", staticmethod(lambda groups, method, *rest, **_: done.append(method)))
    runtime = RayRuntime.__new__(RayRuntime)
    runtime.trainer = SimpleNamespace(trained=[])
    runtime._phases = SimpleNamespace(train=lambda: done.append("train")) if shared else None
    write = runtime.save_state(Path("state"))
    assert done == ["train", "copy"] if shared else ["copy"]
    write()
    assert done[-1] == "write", "while engines sample again"
