"""Code that runs in Ray's processes: training workers and engines. Nothing here imports torch before a device is chosen."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_host.distributed.ray.setups import EngineSetup, RemoteRoles, plain, start_engine
from rlhf_host.distributed.split.ports import reserved
from rlhf_host.engines.requests import Request
from rlhf_host.errors import RunError
from rlhf_host.garbage import freeze
from rlhf_host.protocols import NO_WEIGHTS, Counting, Measured, WakesInParts, Writer
from rlhf_host.records.episodes import Generation
from rlhf_host.records.tensors import Metric

if TYPE_CHECKING:
    from rlhf_host.distributed.ray.batch_shards import Shard
    from rlhf_host.models.flops import ModelFlops

Answer = tuple[int, Generation | Exception]
"""A request's number and its result."""
BESIDE, WRITING = "beside", "writing"
"""The concurrency groups of ``WorkerActor.alive`` and ``write``; all other calls are done one after another, by one thread."""
TELL_S = 5.0
"""Seconds between an engine's reports of sampled tokens if no answer is finished."""
WATCH_S = 1.0
"""Seconds between checks that an engine's own processes live."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Description of an engine that is up. ``life`` is different for every process of the engine."""

    life: str
    version: int
    context_length: int | None
    exact: bool
    pid: int


class Loaded(NamedTuple):
    """Models of a training worker, as the controller needs to know them."""

    context_lengths: dict[str, int]
    """Longest row of each role, in tokens."""
    exact: bool
    """Everything computes in 32 bits."""
    flops: ModelFlops | None
    """Operations of the actor; None: it is not here, or they are not known."""


class LifeOver(Exception):
    """Raised if the addressed process has died since, and this is the next one."""


def _plainly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the method so that its errors can be read in the other process, which may lack a plugin's own classes."""

    @functools.wraps(method)
    def call(*arguments: Any) -> Any:
        try:
            return method(*arguments)
        except Exception as error:
            raise plain(error) from error

    @functools.wraps(method)
    async def call_async(*arguments: Any) -> Any:
        try:
            return await method(*arguments)
        except LifeOver:
            raise
        except Exception as error:
            raise plain(error) from error

    return call_async if inspect.iscoroutinefunction(method) else call


def own_gpus() -> list[str]:
    """Returns the GPUs that Ray has given this process, as ``CUDA_VISIBLE_DEVICES`` names them."""
    import ray

    return [str(gpu) for gpu in ray.get_gpu_ids()]


def _user_set_threads() -> bool:
    """Returns True if this process was started with ``OMP_NUM_THREADS``: Ray sets it later, to the CPUs that it counts."""
    try:
        with open("/proc/self/environ", "rb") as file:
            return any(variable.startswith(b"OMP_NUM_THREADS=") for variable in file.read().split(b"\0"))
    except OSError:
        return "OMP_NUM_THREADS" in os.environ


class WorkerActor:
    """One rank: a ``Worker`` with the roles placed on its device. Calls are done one after another, in the order of arrival."""

    def __init__(self) -> None:
        self.copies: dict[str, Writer] = {}
        """Copies that are not written yet, by their names."""
        self.place: socket.socket | None = None
        """Socket that keeps the port at which ranks may meet here, until they have."""

    def look(self) -> dict[str, Any]:
        """Returns where this process is: for rank 0, where the ranks meet; for an engine on the same device, which device that
        is.
        """
        import ray

        address = ray.util.get_node_ip_address()
        self.place = reserved(address)
        node = ray.get_runtime_context().get_node_id()
        return {"address": address, "port": self.place.getsockname()[1], "gpus": own_gpus(), "node": node, "pid": os.getpid()}

    def alive(self) -> None:
        """Answers, whatever this process computes, in its own thread."""

    @_plainly
    def start(
        self, setup: RemoteRoles, rank: int, size: int, address: str, port: int, parts: int, gpu: bool, cpus: int | None = None
    ) -> Loaded:
        """Loads the roles and connects to the other processes.

        Args:
            parts: neighbouring processes that share a rank's rows.
            cpus: this process's CPUs, unless the user has set ``OMP_NUM_THREADS``; None: those that Ray counts for it.

        Raises:
            UserError: plugins, models or options that cannot be used here.
        """
        if address.startswith("127."):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # or Gloo listens on the interface of the machine's name
        # Where Ray is told to leave the variable alone, a process would see all GPUs and take the first.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own_gpus()) if gpu else ""
        threads = setup.start.train.threads
        if not threads and not _user_set_threads():
            threads = int(os.environ.get("OMP_NUM_THREADS") or 0) if cpus is None else cpus
        if threads:
            os.environ["OMP_NUM_THREADS"] = str(threads)  # for libraries that are not loaded yet
        import torch

        from rlhf_host.distributed.split.ranks import Ranks

        if threads:
            torch.set_num_threads(threads)
        sliced = any(settings.sequence_parallel > 1 for _, settings in setup.roles)
        ranks = Ranks.join(rank, size, address, port, parts=parts, sliced=sliced, backend="nccl" if gpu else "gloo")
        if self.place is not None:
            self.place.close()
        self.roles = setup.build(ranks)
        freeze()
        return Loaded(self.roles.context_lengths, self.roles.exact, self.roles.flops)

    @_plainly
    def compute(self, method: str, role: str, arguments: tuple[Any, ...], shard: Shard) -> tuple[Any, float]:
        """Returns ``outputs`` or ``topk`` of the shard's rows as arrays, of their tokens ``[n, ...]`` where they have such, and
        the seconds it took.
        """
        from rlhf_host.records.ragged import RaggedTensor

        results, seconds = self._timed(method, role, *arguments, shard.batch())
        tensors = results if isinstance(results, tuple) else (results,)
        arrays = [(tensor.tokens if isinstance(tensor, RaggedTensor) else tensor).numpy() for tensor in tensors]
        return arrays, seconds

    def _timed(self, method: str, *arguments: Any, **more: Any) -> tuple[Any, float]:
        """Calls a method of the worker; returns its result, and the seconds that it computed."""
        before = self.roles.worker.compute_s
        result = getattr(self.roles.worker, method)(*arguments, **more)
        return result, self.roles.worker.compute_s - before

    @_plainly
    def of_worker(self, method: str, arguments: Mapping[str, Any]) -> tuple[Any, float]:
        """Returns the result of a method of ``Worker`` that takes no batch, and the seconds that it computed."""
        return self._timed(method, **arguments)

    @_plainly
    def on_batch(self, method: str, shard: Shard, more: Shard, whole: Any, arguments: Mapping[str, Any]) -> tuple[Any, float]:
        """Does this rank's part of ``update``, ``forward_backward`` or ``evaluate``; returns its result, and the seconds that it
        computed.
        """
        from rlhf_host.training.memory import memory

        result, seconds = self._timed(method, shard.batch(more), whole=whole, rows=shard.rows, **arguments)
        if method == "update":
            result.metrics.add(Metric(name, used, reduce="max") for name, used in memory().items())
        return result, seconds

    @_plainly
    def of_roles(self, method: str, *arguments: Any) -> Any:
        """Returns the result of a method of ``Roles``: ``run`` or ``load_state``."""
        return getattr(self.roles, method)(*arguments)

    @_plainly
    def copy(self, name: str, method: str, *arguments: str) -> None:
        """Keeps the result of ``copy_role`` or ``copy_state`` for ``write``, in place of an older one of that name."""
        self.copies[name] = getattr(self.roles, method)(*arguments)

    @_plainly
    def write(self, name: str) -> None:
        """Writes a copy, in its own thread."""
        self.copies.pop(name)()

    @_plainly
    def of_backends(self, method: str) -> None:
        """Calls ``offload`` or ``reload`` on every trained role."""
        for backend in self.roles.backends.values():
            getattr(backend, method)()


async def _leave_with(engine: Any) -> None:
    """Ends this process if the one that the engine computes in has died: Ray then starts both again."""
    while not engine.dead:
        await asyncio.sleep(WATCH_S)
    os._exit(1)


class EngineActor:
    """One engine. A process that Ray restarts begins without engine and with another ``life``."""

    def __init__(self) -> None:
        self.life = secrets.token_hex(8)
        self.engine: Any = None
        self.open: dict[int, asyncio.Task[Generation]] = {}
        self.watch: asyncio.Task[None] | None = None

    async def alive(self) -> None:
        """Answers, whatever the engine does."""

    @_plainly
    async def start(self, setup: EngineSetup, threads: int, gpus: Sequence[str] | None) -> EngineInfo:
        """Builds the engine, which has no weights of the run yet. A second call only returns the description.

        Args:
            gpus: GPUs that it may see; None: those that Ray has given it.

        Raises:
            UserError: a plugin, model or options that cannot be used here.
        """
        if self.engine is None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own_gpus() if gpus is None else gpus)
            from rlhf_host.runtimes.compute import OneThread

            self.engine = start_engine(setup, OneThread(threads))
            freeze()
            self.watch = asyncio.create_task(_leave_with(self.engine))
        engine = self.engine
        return EngineInfo(self.life, engine.version, engine.context_length, engine.exact, os.getpid())

    async def generate(self, life: str, batch: Sequence[tuple[int, Request]]) -> AsyncIterator[tuple[int, list[Answer]]]:
        """Samples all requests. Yields lists of answers as they finish, each with the number of tokens that the engine has
        sampled so far. This number also comes now and then without answers. The answer to a request that cannot be served is an
        error.

        Raises:
            LifeOver: ``life`` is not this process's.
        """
        self._check(life)
        finished: asyncio.Queue[Answer] = asyncio.Queue()
        mine = {}
        for number, request in batch:
            task = asyncio.create_task(self.engine.generate(request.token_ids, request.sampling, request.key))
            task.add_done_callback(functools.partial(self._answer, number, finished))
            mine[number] = self.open[number] = task
        self.engine.expect(len(self.open))
        left = len(batch)
        first = asyncio.ensure_future(finished.get())
        try:
            while left:
                await asyncio.wait([first], timeout=TELL_S)
                answers = []
                if first.done():
                    answers, first = [first.result()], asyncio.ensure_future(finished.get())
                    while not finished.empty():
                        answers.append(finished.get_nowait())
                left -= len(answers)
                yield self.engine.sampled if isinstance(self.engine, Counting) else 0, answers
        finally:
            for task in (first, *mine.values()):
                task.cancel()

    def _answer(self, number: int, finished: asyncio.Queue[Answer], task: asyncio.Task[Generation]) -> None:
        """Answers a request, even one that was aborted before it began."""
        self.open.pop(number, None)
        try:
            answer: Generation | Exception = task.result()
        except asyncio.CancelledError:
            answer = RunError("aborted")
        except Exception as error:
            answer = plain(error)
        finished.put_nowait((number, answer))
        if self.open:
            self.engine.expect(len(self.open))

    @_plainly
    async def generate_alone(self, life: str, request: Request) -> Generation:
        """Returns one completion, from exactly this engine. Raises the engine's errors, and ``LifeOver``."""
        self._check(life)
        self.engine.expect(len(self.open) + 1)
        return await self.engine.generate(request.token_ids, request.sampling, request.key)

    @_plainly
    async def metrics(self, life: str) -> list[Metric]:
        """Returns the engine's metrics since the last call, and this process's memory. Raises ``LifeOver``."""
        from rlhf_host.training.memory import memory

        self._check(life)
        own = await self.engine.metrics() if isinstance(self.engine, Measured) else ()
        return [*own, *(Metric(name.removeprefix("memory/"), used, reduce="max") for name, used in memory().items())]

    async def abort(self, numbers: Sequence[int]) -> None:
        """Drops requests that nobody waits for any more."""
        for number in numbers:
            if (task := self.open.get(number)) is not None:
                task.cancel()

    @_plainly
    async def run(self, life: str, function: str, arguments: Mapping[str, Any]) -> tuple[list[Any], int]:
        """Calls the engine's own ``run``; returns also the version that the engine has after it. Raises ``LifeOver``."""
        self._check(life)
        results = await self.engine.run(function, **arguments)
        return results, self.engine.version

    def _check(self, life: str) -> None:
        if life != self.life:
            raise LifeOver

    @_plainly
    async def sleep(self, keep: bool) -> int:
        """Returns the version that is left. A process that was started again has no engine yet.

        Args:
            keep: keep the weights, even if the engine can do without.
        """
        if self.engine is None:
            return NO_WEIGHTS
        in_parts = not keep and isinstance(self.engine, WakesInParts)
        await (self.engine.sleep_empty() if in_parts else self.engine.sleep())
        return int(self.engine.version)

    @_plainly
    async def wake(self, weights_only: bool) -> None:
        if self.engine is None:
            return
        in_parts = weights_only and isinstance(self.engine, WakesInParts)
        await (self.engine.wake_weights() if in_parts else self.engine.wake())

    async def close(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            await engine.close()
