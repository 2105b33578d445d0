"""Weights through CUDA IPC to engines in processes of their own on the same GPU, also when one is killed in mid-sync."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from gpu_parts.machine import GB, Machine, finish, held_bytes, random_model
from rlhf_host.backends.weights import in_buckets, named_weights
from rlhf_host.engines.loading import ModuleLoader, call_by_path, copy_weights
from rlhf_host.errors import RunError
from rlhf_host.protocols import Buckets, SyncTarget
from rlhf_host.weight_sync.ipc import IPC
from rlhf_host.weight_sync.local_source import LocalSource

CONTEXT = multiprocessing.get_context("forkserver")
DIGEST = "digest"
DEADLY = 3
"""The bucket before which a receiver dies: by then it has read the first, and holds memory of the trainer's."""


def rate(machine: Machine) -> tuple[float, dict[str, Any]]:
    """GB of weights per second to an engine, which then has them bit by bit."""
    model, seconds = random_model(machine), []
    with _engines(machine, 1) as engines:

        async def scenario() -> None:
            plugin, source = await _connected(machine, engines), LocalSource(model)
            for version in range(machine.size(6, 2)):
                _change(model)
                finish(machine)
                started = time.perf_counter()
                await plugin.send(source, version)
                seconds.append(time.perf_counter() - started)
                await _compare(engines, model)
            await plugin.close()

        asyncio.run(scenario())
    size = sum(weight.nbytes for weight in model.parameters()) / GB
    median = statistics.median(seconds[1:])
    return size / median, {"gb": size, "seconds": median, "first_s": seconds[0]}


def killed(machine: Machine) -> tuple[float, dict[str, Any]]:
    """Seconds from the death of a receiver until the sync fails and names it; then the other engine is synced alone."""
    model, times = random_model(machine), []
    before = held_bytes(machine)
    with _engines(machine, 2) as (stays, victim):

        def deadly(bucket_bytes: int) -> Buckets:
            for number, bucket in enumerate(in_buckets(named_weights(model), bucket_bytes)):
                if number == DEADLY:
                    victim.kill()
                    times.append(time.perf_counter())
                yield bucket

        async def scenario() -> None:
            plugin = await _connected(machine, [stays, victim])
            await plugin.send(LocalSource(model), 0)
            _change(model)
            try:
                await plugin.send(LocalSource(model, deadly), 1)
            except RunError as error:
                times.append(time.perf_counter())
                if "engine e1: the engine's process has ended" not in str(error):
                    raise RuntimeError(f"the dead engine is not named: {error}") from error
            else:
                raise RuntimeError("a sync went well although a receiver was killed in it")
            await plugin.connect(_targets([stays]))
            await plugin.send(LocalSource(model), 1)
            await _compare([stays], model)
            await plugin.close()

        asyncio.run(scenario())
    gc.collect()
    return times[1] - times[0], {"held_afterwards_mb": (held_bytes(machine) - before) / 1e6}


class EngineProcess:
    """An engine that only holds weights, as a sync sees it."""

    def __init__(self, machine: Machine):
        self.pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=serve, args=(theirs, machine), daemon=True)
        self.process.start()
        theirs.close()
        self.version = -1
        self._calls = ThreadPoolExecutor(1)

    async def run(self, function: str, **arguments: Any) -> list[Any]:
        return [await asyncio.wrap_future(self._calls.submit(self._call, function, arguments))]

    def set_version(self, version: int) -> None:
        self.version = version

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def _call(self, function: str, arguments: dict[str, Any]) -> Any:
        try:
            self.pipe.send((function, arguments))
            good, result = self.pipe.recv()
        except (EOFError, OSError):
            raise RunError("the engine's process has ended") from None
        if not good:
            raise result
        return result


def serve(pipe: Any, machine: Machine) -> None:
    """The engine's process: a model with other weights than the trainer's, and one call after the other."""
    torch.set_num_threads(1)
    model = random_model(machine, seed=1)
    loader = ModuleLoader("engine", model, lambda buckets, version: copy_weights(model, buckets))
    with contextlib.suppress(EOFError):
        while True:
            function, arguments = pipe.recv()
            try:
                answer = digest(model) if function == DIGEST else call_by_path(function, loader, arguments)
                pipe.send((True, answer))
            except Exception as error:
                pipe.send((False, error))


def digest(model: nn.Module) -> dict[str, int]:
    """A sum over every weight's bits."""
    return {name: int(weight.detach().view(torch.int32).sum()) for name, weight in model.named_parameters()}


@contextlib.contextmanager
def _engines(machine: Machine, count: int) -> Iterator[list[EngineProcess]]:
    CONTEXT.set_forkserver_preload(["transformers.models.qwen2.modeling_qwen2"])
    engines = [EngineProcess(machine) for _ in range(count)]
    try:
        yield engines
    finally:
        for engine in engines:
            engine.kill()


def _targets(engines: list[EngineProcess]) -> list[SyncTarget]:
    return [SyncTarget(f"e{number}", engine) for number, engine in enumerate(engines)]  # type: ignore[arg-type]


async def _connected(machine: Machine, engines: list[EngineProcess]) -> IPC:
    plugin = IPC(IPC.Options(bucket_mb=machine.size(256, 1), timeout_s=120))
    await plugin.connect(_targets(engines))
    return plugin


def _change(model: nn.Module) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.01)


async def _compare(engines: list[EngineProcess], model: nn.Module) -> None:
    expected = digest(model)
    for number, engine in enumerate(engines):
        [answer] = await engine.run(DIGEST)
        if wrong := [name for name, value in expected.items() if answer[name] != value]:
            raise RuntimeError(f"engine e{number} has other weights than the trainer: {', '.join(wrong[:3])}")
