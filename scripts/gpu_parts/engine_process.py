"""Engines in processes of their own that only hold weights, as a sync sees them."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpu_parts.machine import Machine, random_model
from rlhf_host.engines.loading import ModuleLoader, call_by_path, copy_weights
from rlhf_host.errors import RunError
from rlhf_host.protocols import SyncTarget

CONTEXT = multiprocessing.get_context("forkserver")
DIGEST = "digest"


@dataclass(frozen=True)
class Kind:
    """Weights of an engine's process, and their place."""

    layers: int | None = None
    dtype: torch.dtype = torch.float32
    gpu: int = 0


class EngineProcess:
    def __init__(self, machine: Machine, kind: Kind):
        self.pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=serve, args=(theirs, machine, kind), daemon=True)
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


def serve(pipe: Any, machine: Machine, kind: Kind) -> None:
    """The engine's process: a model with other weights than the trainer's, and one call after the other."""
    torch.set_num_threads(1)
    if not machine.dry:
        torch.cuda.set_device(kind.gpu)
    model = random_model(machine, layers=kind.layers, seed=1).to(kind.dtype)
    loader = ModuleLoader("engine", model, lambda buckets, version: copy_weights(model, buckets))
    with contextlib.suppress(EOFError):
        while True:
            function, arguments = pipe.recv()
            try:
                answer = digest(model, kind.dtype) if function == DIGEST else call_by_path(function, loader, arguments)
                pipe.send((True, answer))
            except Exception as error:
                pipe.send((False, error))


def digest(model: nn.Module, dtype: torch.dtype) -> dict[str, int]:
    """A sum over every weight's bits in this type."""
    bits = torch.int32 if dtype.itemsize == 4 else torch.int16
    return {name: int(weight.detach().to(dtype).view(bits).sum()) for name, weight in model.named_parameters()}


@contextlib.contextmanager
def engines_of(machine: Machine, count: int, kind: Kind = Kind()) -> Iterator[list[EngineProcess]]:
    CONTEXT.set_forkserver_preload(["transformers.models.qwen2.modeling_qwen2"])
    engines = [EngineProcess(machine, kind) for _ in range(count)]
    try:
        yield engines
    finally:
        for engine in engines:
            engine.kill()


def targets_of(engines: list[EngineProcess]) -> list[SyncTarget]:
    return [SyncTarget(f"e{number}", engine) for number, engine in enumerate(engines)]  # type: ignore[arg-type]


async def compare(engines: list[EngineProcess], model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Raises ``RuntimeError`` if an engine has other weights than the model, bit by bit."""
    expected = digest(model, dtype)
    for number, engine in enumerate(engines):
        [answer] = await engine.run(DIGEST)
        if wrong := [name for name, value in expected.items() if answer[name] != value]:
            raise RuntimeError(f"engine e{number} has other weights than the trainer: {', '.join(wrong[:3])}")
