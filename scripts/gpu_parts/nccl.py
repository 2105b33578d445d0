"""A receiver that is killed while weights go to it through a process group: seconds until the trainer has trained again. In a dry
run the group is gloo's."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import os
import sys
import threading
import time
import traceback

import torch

from gpu_parts.engine_process import Kind, compare, engines_of, targets_of
from gpu_parts.machine import Machine, Report, Skipped, finish, random_model, random_rows, update, worker_of
from rlhf_host.backends.weights import in_buckets, named_weights
from rlhf_host.config.schema import TrainConfig
from rlhf_host.distributed.sync.plugin import Broadcast
from rlhf_host.errors import RunError
from rlhf_host.protocols import Buckets
from rlhf_host.weight_sync.local_source import LocalSource

LAYERS = 4
DEADLY = 3
"""The bucket before which a receiver dies in mid-sync."""
PATIENCE_S = 60.0
"""Longest time for a sync, and for the step after it."""
SHARED_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Environment variable by which newer versions of NCCL allow several ranks on one GPU."""


def forming(machine: Machine, report: Report) -> None:
    """The receiver dies in the first sync, before its first broadcast: NCCL forms a communicator then, and the trainer waits for
    the other end. One GPU is enough, because NCCL never sees the receiver.
    """
    _killed(machine, report, sync=0, bucket=0, gpu=0)


def abort(machine: Machine, report: Report) -> None:
    """The receiver dies in the middle of the second sync, so that the trainer's broadcast waits for it.

    Raises:
        Skipped: there is one GPU.
    """
    several = torch.cuda.device_count() > 1
    if not machine.dry and not several and os.environ.get(SHARED_GPU) != "1":
        raise Skipped(f"NCCL refuses two ranks on one GPU: it needs two GPUs, or a version of NCCL that knows {SHARED_GPU}=1")
    _killed(machine, report, sync=1, bucket=DEADLY, gpu=int(several))


def _killed(machine: Machine, report: Report, *, sync: int, bucket: int, gpu: int) -> None:
    """Seconds from the death until the trainer has done a step; then a new engine is synced.

    Args:
        sync: number of the sync in which the receiver dies, before this bucket is sent.
        gpu: the receiver's.
    """
    model, times, syncs = random_model(machine, layers=LAYERS), [], itertools.count()
    rows = random_rows(model, 4, machine.size(256, 8), machine.size(256, 8))
    worker, kind = worker_of(model, TrainConfig()), Kind(LAYERS, gpu=gpu)
    update(worker, rows)
    finish(machine)
    if not machine.dry:
        atexit.register(os._exit, 0)  # a kernel or a thread that NCCL keeps would keep this process from ending
    backend = "gloo" if machine.dry else "nccl"
    options = {"bucket_mb": machine.size(32, 1), "timeout_s": PATIENCE_S}

    with engines_of(machine, 1, kind) as [victim]:

        def deadly(bucket_bytes: int) -> Buckets:
            dies = next(syncs) == sync
            for number, one in enumerate(in_buckets(named_weights(model), bucket_bytes)):
                if dies and number == bucket:
                    victim.kill()
                    times.append(time.perf_counter())
                yield one

        def train() -> None:
            update(worker, rows)
            finish(machine)
            times.append(time.perf_counter())

        async def lose_it() -> None:
            plugin, source = Broadcast(Broadcast.Options(backend=backend, **options)), LocalSource(model, deadly)
            await plugin.connect(targets_of([victim]))
            for version in range(sync):
                await plugin.send(source, version)
                await compare([victim], model)
            try:
                await plugin.send(source, sync)
            except RunError as error:
                times.append(time.perf_counter())
                if "engine e0: the engine's process has ended" not in str(error):
                    raise RuntimeError(f"the dead engine is not named: {error}") from error
            else:
                raise RuntimeError("a sync went well although its receiver was killed in it")
            await plugin.close()

        asyncio.run(lose_it())
        step = threading.Thread(target=train, daemon=True)  # a kernel that hangs would keep it for ever
        step.start()
        step.join(PATIENCE_S)
        if len(times) < 3:
            raise RuntimeError(f"after the failed sync the trainer did no step within {PATIENCE_S:g} s")
    hanging = _hanging()

    with engines_of(machine, 1, kind) as engines:

        async def sync_anew() -> None:
            plugin = Broadcast(Broadcast.Options(**options))
            await plugin.connect(targets_of(engines))
            await plugin.send(LocalSource(model), sync + 1)
            await compare(engines, model)
            await plugin.close()

        asyncio.run(sync_anew())
    died, failed, trained = times
    report(trained - died, {"backend": backend, "sync_failed_s": failed - died, "threads_that_hang": hanging})


def _hanging() -> int:
    """Number of threads that are still in a call of the process group, or in its abort."""
    frames = sys._current_frames()
    stacks = [(thread.name, traceback.extract_stack(frames.get(thread.ident or 0))) for thread in threading.enumerate()]
    return sum(name == "rlhf-abort" or any("process_group" in line.filename for line in stack) for name, stack in stacks)
