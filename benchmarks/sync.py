"""Gigabytes per second of every weight sync on one machine, beside a plain copy in memory.

    python benchmarks/sync.py                             # 512 MB of float32 to one engine process
    python benchmarks/sync.py --engines 2 --mb 2048 --bucket-mb 64

The trainer is this process; every engine is a process of its own that copies what comes into weights of its own, as the
embedded engine does. ``copy`` is one thread copying the same tensors within one process; ``both`` is what each of two threads
reaches when they do that at once, as trainer and engine do in a sync. A rate is the weights' size over the
median time of a sync, however many engines take part; the first sync, which also connects, is given apart. Below, the last sync by
``ipc``: when each bucket was packed and when the first engine loaded it, in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

WIDTH = 2048


def make_weights(mb: int) -> nn.Module:
    """Matrices of 16 MB, each with a vector, as in a transformer."""
    model = nn.Module()
    for number in range(max(1, mb * 2**20 // (4 * WIDTH * WIDTH))):
        model.register_parameter(f"layer{number}_weight", nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False))
        model.register_parameter(f"layer{number}_bias", nn.Parameter(torch.randn(WIDTH), requires_grad=False))
    return model


def serve(pipe: Any, mb: int) -> None:
    """An engine's process: one call after another."""
    from rlhf_host.engines.loading import ModuleLoader, call_by_path, copy_weights

    torch.set_num_threads(1)
    model = make_weights(mb)
    spans: list[tuple[float, float]] = []
    loader = ModuleLoader("bench", model, lambda buckets, version: copy_weights(model, timed(buckets, spans)))
    loader.state["spans"] = spans
    pipe.send(None)
    while (message := pipe.recv()) is not None:
        function, arguments = message
        pipe.send(call_by_path(function, loader, arguments))


def timed(buckets: Any, spans: list[tuple[float, float]]) -> Any:
    """Yields the buckets; ``spans`` gets from when to when each was used, by a clock that all processes share."""
    spans.clear()
    for bucket in buckets:
        began = time.perf_counter()
        yield bucket
        spans.append((began, time.perf_counter()))


def spans_of(loader: Any) -> list[tuple[float, float]]:
    """Runs in an engine's process."""
    return list(loader.state["spans"])


def watch_packing(spans: list[tuple[float, float]]) -> None:
    """Notes from when to when the trainer packs each bucket of a sync."""
    from rlhf_host.distributed.sync.buckets import BucketLayout

    pack = BucketLayout.pack

    def watched(self: Any, bucket: Any, buffer: Any) -> None:
        began = time.perf_counter()
        pack(self, bucket, buffer)
        spans.append((began, time.perf_counter()))

    BucketLayout.pack = watched  # type: ignore[method-assign]


def timeline(packed: list[tuple[float, float]], loaded: list[tuple[float, float]]) -> tuple[list[str], int]:
    """Returns lines for people, and the number of buckets of which packing began before the one before was loaded."""
    packed = packed[-len(loaded) :]
    origin = packed[0][0]
    shown = [f"{'bucket':>6}  {'packed from':>11}  {'to':>6}  {'loaded from':>11}  {'to':>6}"]
    for number, spans in enumerate(zip(packed, loaded, strict=True)):
        (a, b), (c, d) = (tuple(1e3 * (at - origin) for at in span) for span in spans)
        shown.append(f"{number:6}  {a:11.1f}  {b:6.1f}  {c:11.1f}  {d:6.1f}")
    return shown, sum(packed[k + 1][0] < loaded[k][1] for k in range(len(loaded) - 1))


class Engine:
    """An engine as a sync plugin sees it."""

    model = None

    def __init__(self, mb: int):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, mb), daemon=True)
        self.process.start()
        self.pipe.recv()
        self.version = -1

    async def run(self, function: str, **arguments: Any) -> list[Any]:
        self.pipe.send((function, arguments))
        return [await asyncio.to_thread(self.pipe.recv)]

    def set_version(self, version: int) -> None:
        self.version = version

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join()


async def measure(plugin: Any, model: nn.Module, engines: list[Engine], rounds: int, gigabytes: float) -> dict[str, float]:
    from rlhf_host.protocols import SyncTarget
    from rlhf_host.weight_sync.local_source import LocalSource

    source, seconds = LocalSource(model), []
    await plugin.connect([SyncTarget(f"engine-{number}", engine) for number, engine in enumerate(engines)])
    for version in range(rounds + 1):
        started = time.perf_counter()
        await plugin.send(source, version)
        seconds.append(time.perf_counter() - started)
    await plugin.close()
    median = statistics.median(seconds[1:])
    return {"gb_per_s": round(gigabytes / median, 2), "seconds": round(median, 3), "first_s": round(seconds[0], 3)}


def rate_of_both(model: nn.Module, rounds: int, gigabytes: float) -> dict[str, float]:
    """Returns the slower of two copies at once."""
    with ThreadPoolExecutor(2) as threads:
        rates = [threads.submit(copy_rate, model, rounds, gigabytes) for _ in range(2)]
        return min((rate.result() for rate in rates), key=lambda rate: rate["gb_per_s"])


def copy_rate(model: nn.Module, rounds: int, gigabytes: float) -> dict[str, float]:
    torch.set_num_threads(1)
    sources = list(model.parameters())
    targets = [torch.zeros_like(source) for source in sources]
    seconds = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds[1:])
    return {"gb_per_s": round(gigabytes / median, 2), "seconds": round(median, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=512, help="of float32 weights")
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    from rlhf_host.distributed.sync.plugin import IPC, Broadcast, Checkpoint

    torch.set_num_threads(1)
    model = make_weights(options.mb)
    gigabytes = sum(p.numel() * p.element_size() for p in model.parameters()) / 1e9
    found = {name: rate(model, options.rounds, gigabytes) for name, rate in (("copy", copy_rate), ("both", rate_of_both))}
    engines = [Engine(options.mb) for _ in range(options.engines)]
    packed: list[tuple[float, float]] = []
    watch_packing(packed)
    with tempfile.TemporaryDirectory() as directory:
        for kind, extra in ((IPC, {}), (Broadcast, {}), (Checkpoint, {"directory": Path(directory)})):
            plugin = kind(kind.Options(bucket_mb=options.bucket_mb, **extra))
            found[kind.name] = asyncio.run(measure(plugin, model, engines, options.rounds, gigabytes))
            if kind is IPC:
                [loaded] = asyncio.run(engines[0].run(f"{__spec__.name if __spec__ else 'sync'}:spans_of"))
                lines, overlapping = timeline(packed, loaded)
    for engine in engines:
        engine.close()
    print("\n".join(lines))
    print(f"ipc: {overlapping} of {len(lines) - 2} buckets began to be packed before the previous one was loaded")
    for name, rates in found.items():
        print(f"{name:10} {rates['gb_per_s']:6.2f} GB/s  {rates['seconds']:7.3f} s")
    print(
        json.dumps(
            {"benchmark": "sync", **vars(options), "gigabytes": round(gigabytes, 3), "overlapping": overlapping, **found}
        )
    )


if __name__ == "__main__":
    main()
