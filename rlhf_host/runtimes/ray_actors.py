"""What runs in Ray's processes: training workers and engines. Nothing here imports torch before a device is chosen."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_host.config.schema import RoleConfig, TrainConfig
from rlhf_host.engines.requests import Request
from rlhf_host.errors import RunError, UserError
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.plugins.specs import PluginSpec, check_host
from rlhf_host.protocols import Backend, Engine, EngineStart
from rlhf_host.records.episodes import Generation
from rlhf_host.records.needs import Needs, RoleNeed

if TYPE_CHECKING:
    from rlhf_host.runtimes.batch_shards import Shard

Answer = tuple[int, Generation | Exception]
"""A request's number and what came of it."""


WATCH_S = 1.0
"""Between looks whether an engine's own processes live."""


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """What a training worker is told. The same for all ranks of a group."""

    host_version: str
    roles: Sequence[tuple[RoleNeed, RoleConfig]]
    needs: Needs
    plugins: Sequence[PluginSpec]
    backend: PluginSpec
    kernels: Sequence[PluginSpec]
    train: TrainConfig
    total_updates: int
    gpu: bool
    parts: int
    """Neighbouring processes that the backend splits every model over."""


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """What an engine is told."""

    host_version: str
    engine: PluginSpec
    kernels: Sequence[PluginSpec]
    role: RoleConfig
    version: int
    """Of the weights in ``role.model``; -1: a sync will bring others."""
    threads: int
    gpus: Sequence[str] | None = None
    """Which it may see, where Ray has not chosen them."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says once it is up. ``life`` is another for every process that it has been."""

    life: str
    version: int
    context_length: int | None
    exact: bool
    pid: int


class LifeOver(Exception):
    """The process that was asked has died since, and this is the next one."""


def plain(error: Exception) -> Exception:
    """An error that survives the way back: of the project's two kinds, with the words of ``error`` and nothing else in it."""
    if isinstance(error, UserError | RunError):
        return (UserError if isinstance(error, UserError) else RunError)(str(error))
    return RunError(f"{type(error).__name__}: {' '.join(str(error).split())}")


def _plainly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method with its errors made plain: others (a plugin's own classes) would fail to be read over there."""

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


class WorkerActor:
    """One rank: a ``Worker`` with the roles placed on its device. Calls are done one after another, in the order they came."""

    def look(self) -> dict[str, Any]:
        """Where this process is: for rank 0, where the ranks meet; for an engine on the same device, which one that is."""
        import ray

        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = probe.getsockname()[1]
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if ray.get_gpu_ids() else []
        node = ray.get_runtime_context().get_node_id()
        return {"address": address, "port": port, "gpus": gpus, "node": node, "pid": os.getpid()}

    @_plainly
    def start(self, setup: WorkerSetup, rank: int, size: int, address: str, port: int) -> tuple[dict[str, int], bool]:
        """Load the roles and meet the other processes. Gives every role's context length, and whether all compute in 32 bits.

        Raises:
            UserError: plugins, models or options that cannot be used here.
        """
        check_host(setup.host_version)
        _use_loopback(address)
        if not setup.gpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        import torch

        from rlhf_host.backends.ranks import Ranks
        from rlhf_host.engines.kernels import TriedKernels
        from rlhf_host.models.loading import context_length, load_model
        from rlhf_host.training.role import Role
        from rlhf_host.training.worker import Worker
        from rlhf_host.weight_sync.local_source import LocalWeights

        if setup.train.threads:
            torch.set_num_threads(setup.train.threads)
        hooks = PluginManager.from_specs(setup.plugins)
        backend = setup.backend.build()
        kernels = TriedKernels([(spec.name, spec.build()) for spec in setup.kernels])
        ranks = Ranks.join(rank, size, address, port, parts=setup.parts, backend="nccl" if setup.gpu else "gloo")
        roles = {}
        for need, settings in setup.roles:
            roles[need.name] = Role.of(
                need.name,
                load_model(settings, head=need.head, trainable=need.trainable),
                setup.train,
                kernels=kernels,
                backend=backend if need.trainable else None,
                settings=settings,
                total_updates=setup.total_updates,
                ranks=ranks,
            )
        self.worker = Worker(roles, hooks, setup.train, setup.needs, ranks)
        self.weights = None
        if (actor := roles.get("actor")) is not None:
            weights = actor.backend.weights if actor.backend is not None else None
            self.weights = LocalWeights(actor.passes.model, weights, rank=rank, size=size)
        exact = all(role.passes.exact and (role.backend is None or role.backend.exact) for role in roles.values())
        return {name: context_length(role.passes.model) for name, role in roles.items()}, exact

    @_plainly
    def compute(self, method: str, role: str, arguments: tuple[Any, ...], shard: Shard) -> tuple[Any, float]:
        """``outputs`` or ``topk`` of the shard's rows as arrays, and the seconds it took."""
        before = self.worker.compute_s
        results = getattr(self.worker, method)(role, *arguments, shard.batch())
        arrays = [tensor.numpy() for tensor in (results if isinstance(results, tuple) else (results,))]
        return arrays, self.worker.compute_s - before

    @_plainly
    def adjust(self, role: str, lr: float) -> None:
        self.worker.adjust(role, lr=lr)

    @_plainly
    def update(self, shard: Shard, whole: Any, sampled_now: bool) -> tuple[Any, float]:
        """This rank's part of one optimizer batch: its ``Update`` and the seconds it took."""
        before = self.worker.compute_s
        update = self.worker.update(shard.batch(), sampled_now=sampled_now, whole=whole, rows=shard.rows)
        return update, self.worker.compute_s - before

    @_plainly
    def run(self, function: str, arguments: Mapping[str, Any]) -> Any:
        """``"package.module:function"(weights, **arguments)``."""
        from rlhf_host.engines.loading import call_by_path

        return call_by_path(function, self.weights, arguments)

    @_plainly
    def save_role(self, name: str, directory: str) -> None:
        from rlhf_host.models.loading import quiet_transformers

        with quiet_transformers():
            self._backend(name).save_model(Path(directory))

    @_plainly
    def save_state(self, name: str, directory: str) -> None:
        self._backend(name).save(Path(directory))

    @_plainly
    def load_state(self, name: str, directory: str) -> None:
        self._backend(name).load(Path(directory))

    @_plainly
    def offload(self) -> None:
        """Move what only training needs off the device, where the backend can."""
        for backend in self._backends():
            backend.offload()

    @_plainly
    def reload(self) -> None:
        for backend in self._backends():
            backend.reload()

    def _backends(self) -> list[Backend]:
        return [role.backend for role in self.worker.roles.values() if role.backend is not None]

    def _backend(self, name: str) -> Any:
        backend = self.worker.roles[name].backend
        assert backend is not None
        return backend


async def _leave_with(engine: Any) -> None:
    """End this process when the one that the engine computes in has died: Ray starts both again then."""
    while not engine.dead:
        await asyncio.sleep(WATCH_S)
    os._exit(1)


class EngineActor:
    """One engine. A process that Ray starts again begins without engine and with another ``life``."""

    def __init__(self) -> None:
        self.life = secrets.token_hex(8)
        self.engine: Any = None
        self.open: dict[int, asyncio.Task[None]] = {}
        self.watch: asyncio.Task[None] | None = None

    @_plainly
    async def start(self, setup: EngineSetup) -> EngineInfo:
        """Build the engine; it has no weights of the run yet. Asked again, only say what there is.

        Raises:
            UserError: a plugin, model or options that cannot be used here.
        """
        if self.engine is None:
            check_host(setup.host_version)
            if setup.gpus is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(setup.gpus)
            self.engine = _start_engine(setup)
            self.watch = asyncio.create_task(_leave_with(self.engine))
        engine = self.engine
        return EngineInfo(self.life, engine.version, engine.context_length, engine.exact, os.getpid())

    async def generate(self, life: str, batch: Sequence[tuple[int, Request]]) -> AsyncIterator[list[Answer]]:
        """Sample all; answers come in lists, as they finish. A request that cannot be served has an error for an answer.

        Raises:
            LifeOver: when ``life`` is not this process's.
        """
        self._check(life)
        finished: asyncio.Queue[Answer] = asyncio.Queue()
        mine = {}
        for number, request in batch:
            mine[number] = self.open[number] = asyncio.create_task(self._sample(number, request, finished))
        self.engine.expect(len(self.open))
        left = len(batch)
        try:
            while left:
                answers = [await finished.get()]
                while not finished.empty():
                    answers.append(finished.get_nowait())
                left -= len(answers)
                yield answers
        finally:
            for task in mine.values():
                task.cancel()

    async def _sample(self, number: int, request: Request, finished: asyncio.Queue[Answer]) -> None:
        answer: Generation | Exception
        try:
            answer = await self.engine.generate(request.token_ids, request.sampling, request.key)
        except asyncio.CancelledError:
            answer = RunError("aborted")
        except Exception as error:
            answer = plain(error)
        self.open.pop(number, None)
        finished.put_nowait((number, answer))
        if self.open:
            self.engine.expect(len(self.open))

    async def abort(self, numbers: Sequence[int]) -> None:
        """Drop requests that nobody waits for any more."""
        for number in numbers:
            if (task := self.open.get(number)) is not None:
                task.cancel()

    @_plainly
    async def run(self, life: str, function: str, arguments: Mapping[str, Any]) -> tuple[Any, int]:
        """As the engine's own ``run``; with the version that the engine has after it. Raises ``LifeOver``."""
        self._check(life)
        result = await self.engine.run(function, **arguments)
        return result, self.engine.version

    def _check(self, life: str) -> None:
        if life != self.life:
            raise LifeOver

    @_plainly
    async def sleep(self) -> None:
        await self.engine.sleep()

    @_plainly
    async def wake(self) -> None:
        await self.engine.wake()

    async def close(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            await engine.close()


def _start_engine(setup: EngineSetup) -> Engine:
    from rlhf_host.engines.kernels import TriedKernels
    from rlhf_host.models.loading import load_model, load_tokenizer
    from rlhf_host.runtimes.compute import OneThread

    plugin = setup.engine.build()
    model: Any = setup.role.model
    if plugin.traits.takes == "module":
        # Trained weights are float32, and so must be what they are copied into.
        dtype = "float32" if setup.role.dtype == "auto" else setup.role.dtype
        model = load_model(setup.role.model_copy(update={"dtype": dtype}))
    return plugin.start(
        EngineStart(
            model=model,
            tokenizer=load_tokenizer(setup.role),
            version=setup.version,
            compute=OneThread(setup.threads),
            kernels=TriedKernels([(spec.name, spec.build()) for spec in setup.kernels]),
        )
    )


def _use_loopback(address: str) -> None:
    """Gloo listens on the interface of the machine's name unless told."""
    if address.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
