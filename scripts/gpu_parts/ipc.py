"""Weights through CUDA IPC to engines in processes of their own on the same GPU, also when one is killed in mid-sync."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time

import torch
from torch import nn

from gpu_parts.engine_process import EngineProcess, Kind, compare, engines_of, targets_of
from gpu_parts.machine import GB, Machine, Report, finish, held_bytes, random_model
from rlhf_host.backends.weights import in_buckets, named_weights
from rlhf_host.distributed.sync.plugin import IPC
from rlhf_host.errors import RunError
from rlhf_host.protocols import Buckets
from rlhf_host.weight_sync.local_source import LocalSource

DEADLY = 3
"""The bucket before which a receiver dies: by then it has read the first, and holds memory of the trainer's."""


def rate(machine: Machine, report: Report, *, dtype: torch.dtype = torch.float32) -> None:
    """GB per second to an engine that keeps weights in this type, which is the one they are sent in; it then has them bit by
    bit.
    """
    model, seconds = random_model(machine), []
    size = sum(weight.numel() for weight in model.parameters()) * dtype.itemsize / GB
    with engines_of(machine, 1, Kind(dtype=dtype)) as engines:

        async def scenario() -> None:
            plugin, source = await _connected(machine, engines), LocalSource(model)
            for version in range(machine.size(6, 2)):
                _change(model)
                finish(machine)
                started = time.perf_counter()
                await plugin.send(source, version)
                seconds.append(time.perf_counter() - started)
                await compare(engines, model, dtype)
                if version:
                    report.so_far(size / statistics.median(seconds[1:]), {"gb": size, "first_s": seconds[0]})
            await plugin.close()

        asyncio.run(scenario())
    median = statistics.median(seconds[1:])
    report(size / median, {"gb": size, "seconds": median, "first_s": seconds[0]})


def killed(machine: Machine, report: Report) -> None:
    """Seconds from the death of a receiver until the sync fails and names it; then the other engine is synced alone."""
    model, times = random_model(machine), []
    before = held_bytes(machine)
    with engines_of(machine, 2) as (stays, victim):

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
            await plugin.connect(targets_of([stays]))
            await plugin.send(LocalSource(model), 1)
            await compare([stays], model)
            await plugin.close()

        asyncio.run(scenario())
    gc.collect()
    report(times[1] - times[0], {"held_afterwards_mb": (held_bytes(machine) - before) / 1e6})


async def _connected(machine: Machine, engines: list[EngineProcess]) -> IPC:
    plugin = IPC(IPC.Options(bucket_mb=machine.size(256, 1), timeout_s=120))
    await plugin.connect(targets_of(engines))
    return plugin


def _change(model: nn.Module) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.01)
