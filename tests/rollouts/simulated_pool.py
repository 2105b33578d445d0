"""A pool of engines whose processes die now and then, for random schedules: the pool's and the actors' own code, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

from ray.exceptions import ActorUnavailableError

from rlhf_host.distributed.ray.actors import EngineActor, EngineInfo, LifeOver
from rlhf_host.distributed.ray.engine_pool import EnginePool
from rlhf_host.distributed.ray.runtime import ATTEMPTS
from rlhf_host.errors import RunError
from rlhf_host.protocols import EngineTraits

from .simulated import World

DIED = ActorUnavailableError("the process died", None)


class Process:
    """A handle to an actor: its methods are called as Ray's are, and fail when it dies before they are over."""

    def __init__(self, make: Callable[[], Any]):
        self._make = make
        self.begin()

    def begin(self) -> None:
        self.actor = EngineActor()
        self.actor.engine = self._make()
        self._died = asyncio.get_running_loop().create_future()

    def die(self) -> None:
        self._died.set_result(None)

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(self.actor.life, self.actor.engine.version, None, True, 0)

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Any:
            if name == "generate":
                return self._stream(*arguments)
            return asyncio.ensure_future(self._alive(getattr(self.actor, name)(*arguments)))

        return SimpleNamespace(remote=remote, options=lambda **_: SimpleNamespace(remote=remote))

    async def _alive(self, work: Any) -> Any:
        died, task = self._died, asyncio.ensure_future(work)
        await asyncio.wait({died, task}, return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            task.cancel()
            raise DIED
        try:
            return task.result()
        except LifeOver:
            raise DIED from None

    async def _stream(self, *arguments: Any) -> AsyncIterator[Any]:
        answers = self.actor.generate(*arguments)
        while True:
            try:
                batch = await self._alive(anext(answers))
            except StopAsyncIteration:
                return
            yield asyncio.sleep(0, batch)


class Pool:
    """Engines of a run, and how weights come to them."""

    def __init__(self, world: World, make: Callable[[], Any], *, waves: bool):
        self.world = world
        self.processes = [Process(make) for _ in range(1 + world.seed % 3)]
        traits = EngineTraits(largest_batch=2, waves=waves)
        self.pool = EnginePool([(str(i), one, (None, 0, None)) for i, one in enumerate(self.processes)], traits)
        self.pool.lives.start(one.info for one in self.processes)
        self.pool.resync = self._resync
        self.expect, self.generate = self.pool.expect, self.pool.generate
        self._lock = asyncio.Lock()
        self.version = self.pool.version
        self._fate = asyncio.create_task(self._end_some())

    async def sync(self, version: int) -> None:
        async with self._lock:
            self.version = version
            await self._bring()

    async def _resync(self) -> None:
        async with self._lock:
            if self.version >= 0:
                await self._bring()

    async def _bring(self) -> None:
        self.pool.coming = self.version
        for attempt in range(ATTEMPTS):
            engines = [target.engine for target in self.pool.lives.targets]
            try:
                for engine in engines:
                    if engine.version != self.version:
                        await engine.run("load", version=self.version)
                break
            except RunError:
                if [target.engine for target in self.pool.lives.targets] == engines or attempt + 1 == ATTEMPTS:
                    raise
        self.pool.synced(self.version)

    async def _end_some(self) -> None:
        while "failures" in self.world.has:
            await asyncio.sleep(self.world.unhurried * 20 * self.world.takes(1.0))
            process = self.processes[self.world.count(len(self.processes), "dies", self.world.takes()) - 1]
            process.die()
            await asyncio.sleep(0.01 + self.world.takes())
            process.begin()

    async def close(self) -> None:
        self._fate.cancel()
        await self.pool.close()
