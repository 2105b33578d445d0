"""The Ray runtime: roles and engines in processes of their own, on one machine or many; the controller stays here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from rlhf_host import __version__
from rlhf_host.config.schema import RoleConfig, RunConfig
from rlhf_host.engines.protocol import NO_WEIGHTS
from rlhf_host.errors import LostError, RunError, UserError
from rlhf_host.models.loading import find_model
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.protocols import SyncTarget
from rlhf_host.records.needs import Needs, RoleHandle
from rlhf_host.runtimes.device_phases import Turns
from rlhf_host.runtimes.engine_pool import EnginePool
from rlhf_host.runtimes.local import LocalRole, check_trained, role_settings
from rlhf_host.runtimes.placement import Place, devices_per_engine, parse_placement, plan_places, shortage
from rlhf_host.runtimes.ray_actors import EngineActor, EngineInfo, EngineSetup, WorkerActor, WorkerSetup
from rlhf_host.runtimes.ray_cluster import RayCluster
from rlhf_host.runtimes.specs import protocol_spec, worker_specs
from rlhf_host.runtimes.worker_group import RemoteTrainer, WorkerGroup, plain_error, split_places, wait_all
from rlhf_host.weight_sync.verify import verified_syncs, verify_run

log = logging.getLogger(__name__)

ATTEMPTS = 5
"""How often a sync is tried again because an engine died in it."""
PROBES = 4
"""Continuations of the probe by an engine that was started again: each may end after a few tokens."""
START_S = 300.0
"""For a process to come up, with what ``ray.runtime_env`` has to be installed for it."""


class RayRuntime:
    """A group of workers for each place, a pool of engines; ``placement`` and ``ray`` of the configuration say where and how."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

    def __init__(self, options: Options):
        self.options = options
        self._synced: list[Any] | None = None
        self._version = -1

    def start(
        self,
        *,
        config: RunConfig,
        manager: PluginManager,
        needs: Needs,
        tokenizer: Any,
        total_updates: int,
        models: Mapping[str, Path],
    ) -> None:
        """Place every role, start the processes, load the models.

        Raises:
            UserError: the placement cannot be had, or something cannot be used over there; nothing is left running.
        """
        self.manager, self.tokenizer, self.needs = manager, tokenizer, needs
        roles = [need.name for need in needs.roles]
        blocks, per_engine = parse_placement(config.placement), devices_per_engine(config.engine.options)
        # What is wrong in itself is said before Ray starts.
        self._parts = split_places(config.backend, plan_places(blocks, roles, per_engine=per_engine), needs)
        self.cluster = RayCluster(config.ray)
        self.cluster.start()
        try:
            nodes = self.cluster.nodes()
            kind = "gpu" if any(node.gpu for node in nodes) else "cpu"
            places = plan_places(blocks, roles, per_engine=per_engine, default_kind=kind)  # type: ignore[arg-type]
            remedy = "set --ray.num-cpus to count more" if self.cluster.made and kind == "cpu" else "join a larger cluster"
            if (problem := shortage(places, nodes, remedy=remedy)) is not None:
                raise UserError(problem)
            self._start(config, places, self.cluster.reserve(places), total_updates, models)
        except BaseException:
            self.cluster.stop()
            raise

    def _start(
        self,
        config: RunConfig,
        places: Sequence[Place],
        reserved: Sequence[Any],
        total_updates: int,
        models: Mapping[str, Path],
    ) -> None:
        settings = {
            need.name: _found(role_settings(config, need, models.get(need.name), self.needs)) for need in self.needs.roles
        }
        trains = any(need.trainable for need in self.needs.roles)
        engine = EngineSetup(
            host_version=__version__,
            engine=protocol_spec("engine", config.engine),
            role=settings["actor"],
            version=-1 if trains else 0,
            threads=config.train.threads,
        )
        plugins = worker_specs(config, self.manager) if trains else []
        backend = protocol_spec("backend", config.backend)
        # Every process is asked for before any is waited for: most of a start is imports.
        groups: list[tuple[WorkerGroup, WorkerSetup]] = []
        engines: list[tuple[str, Any, EngineSetup]] = []
        homes: dict[str, Any] = {}
        looks: dict[str, list[Any]] = {}
        for place, bundles in zip(places, reserved, strict=True):
            gpu = place.kind == "gpu"
            if place.roles:
                own = [(need, settings[need.name]) for need in self.needs.roles if need.name in place.roles]
                actors = [_actor(WorkerActor, place, bundles, device, 1, config) for device in range(place.devices)]
                trainable = tuple(need.name for need, _ in own if need.trainable)
                parts = self._parts if trainable else 1
                group = WorkerGroup("+".join(place.roles), actors, place.roles, trainable, parts)
                setup = WorkerSetup(__version__, own, self.needs, plugins, backend, config.train, total_updates, gpu, parts)
                groups.append((group, setup))
                looks[group.name] = group.call("look")
            for devices in place.engines:
                share = 0 if place.shared else len(devices)
                actor = _actor(EngineActor, place, bundles, devices[0], share, config)
                # An engine on a worker's GPUs is told which those are; Ray has given it none.
                seen = [looks["+".join(place.roles)][device] for device in devices] if gpu and place.shared else None
                gpus: list[str] | None = None if gpu else []
                if seen is not None:
                    gpus = [name for look in wait_all(seen, place.name, within_s=START_S) for name in look["gpus"]]
                homes[str(len(engines))] = bundles
                engines.append((str(len(engines)), actor, replace(engine, gpus=gpus)))
        starting = [actor.start.remote(setup) for _, actor, setup in engines]
        loading = []
        for group, setup in groups:
            meeting = wait_all(looks[group.name][:1], group.name, within_s=START_S)[0]
            ranks = [(setup, rank, group.size, meeting["address"], meeting["port"]) for rank in range(group.size)]
            loading.append((group, group.call_each("start", ranks)))
        lengths: dict[str, int] = {}
        for group, references in loading:
            lengths |= wait_all(references, group.name)[0]
        self.engine = EnginePool(engines, wait_s=config.ray.wait_s)
        self.engine.homeless = lambda name: self.cluster.lacks_room(homes[name])
        infos: list[EngineInfo] = wait_all(starting, "the engines")
        self.engine.start(infos)
        self.engine.resync = self._resync
        if not trains:
            self.engine.synced(0)
        self.trainer = RemoteTrainer([group for group, _ in groups], unit_rows=self.needs.unit_rows)
        self._turns: Turns | None = None
        if trains and config.engine.options.get("sleep") and any(place.shared for place in places):
            self._turns = Turns(self.engine, self.trainer.groups)
            self.trainer.before, self.engine.before_sampling = self._turns.train, self._turns.sample
        self._actors = [actor for group, _ in groups for actor in group.actors] + [actor for _, actor, _ in engines]
        self.source = RemoteSource(self.trainer.by_role["actor"])
        self.context_length = min(lengths["actor"], *(info.context_length or lengths["actor"] for info in infos))
        self.handles: dict[str, RoleHandle] = {
            name: RemoteRole(self.trainer, name, config.rollout.temperature, settings[name], lengths[name]) for name in lengths
        }
        self._lock = asyncio.Lock()
        self._config = config
        self._proven = {info.life for info in infos}

    def compute_with(self, execute: Callable[[Callable[[], None]], None]) -> None:
        """Nothing is computed in this process."""

    # --- weights ----------------------------------------------------------------------------------

    @property
    def targets(self) -> list[SyncTarget]:
        """The engines that are up."""
        return self.engine.targets

    async def sync(self, version: int) -> None:
        """Bring the actor's weights to the engines as ``version``. An engine that dies meanwhile gets them when it is back."""
        async with self._lock:
            self._version = version
            await self._meet()
            self.trainer.ahead = False

    async def _resync(self) -> None:
        async with self._lock:
            # Between an update and its sync the weights are no version; that sync will reach the new engine too.
            with self.trainer.still:
                if not self.trainer.ahead and self._version >= 0:
                    await self._meet()

    async def _meet(self) -> None:
        if self._turns is None:
            return await self._sync()
        await asyncio.to_thread(self._turns.meet)
        await self._sync()
        await asyncio.to_thread(self._turns.sample)

    async def _sync(self) -> None:
        for attempt in range(ATTEMPTS):
            targets = self.targets
            engines = [target.engine for target in targets]
            try:
                if engines != self._synced:
                    self._synced = None
                    await self._call("sync_connect", targets=targets)
                    self._synced = engines
                await self._call("sync_weights", source=self.source, version=self._version)
                await self._prove(targets)
                break
            except RunError:
                if [target.engine for target in self.targets] == engines or attempt + 1 == ATTEMPTS:
                    raise
        self.engine.synced(self._version)

    async def _prove(self, targets: Sequence[SyncTarget]) -> None:
        """An engine that was started again began with other weights than the run's: it is compared with the trainer before it
        serves, and does not serve until a sync has brought it what the trainer has.

        Raises:
            RunError: no engine is left that has the trainer's weights.
        """
        failed: dict[str, RunError] = {}
        for target in targets:
            engine = target.engine
            if engine.life in self._proven:
                continue
            try:
                compared = await self._compare(target)
            except LostError:
                raise
            except RunError as error:
                failed[target.name] = error
                engine.version = NO_WEIGHTS  # whatever it says of itself
                continue
            if any(engine is up.engine for up in self.targets):  # it may have died again
                self._proven.add(engine.life)
                log.warning("engine %s is back with the weights of version %d (%s)", target.name, self._version, compared)
        if failed and all(target.engine.version != self._version for target in targets):
            raise next(iter(failed.values()))
        for name, problem in failed.items():
            log.error("engine %s is up again, but cannot serve: %s", name, problem)

    async def _compare(self, target: SyncTarget) -> str:
        """What came of comparing its log-probabilities of a probe with the trainer's. Raises ``RunError`` as ``verify_sync``."""
        if verified_syncs(self._config.sync.options.get("verify", "auto")) == 0:
            return "not compared: --sync.verify off"
        gap = await verify_run([target] * PROBES, self, self._version, self._config, self.tokenizer)
        return f"log-probabilities of a probe within {gap:.1g} of the trainer's"

    async def _call(self, hook: str, **arguments: Any) -> None:
        for key in self.manager.names(hook):
            await self.manager.acall(key, hook, **arguments)

    # --- what is kept -----------------------------------------------------------------------------

    @property
    def trainable(self) -> list[str]:
        return [need.name for need in self.needs.roles if need.trainable]

    def save_role(self, name: str, directory: Path) -> None:
        self._everywhere(name, "save_role", directory)
        self.tokenizer.save_pretrained(directory)

    def save_state(self, directory: Path) -> None:
        for name in self.trainable:
            (directory / name).mkdir()
            self._everywhere(name, "save_state", directory / name)

    def load_state(self, directory: Path) -> None:
        check_trained(directory, self.trainable)
        for name in self.trainable:
            self._everywhere(name, "load_state", directory / name)

    def _everywhere(self, role: str, method: str, directory: Path) -> None:
        group = self.trainer.by_role[role]
        wait_all(group.call(method, role, str(directory.absolute())), group.name)

    async def close(self) -> None:
        try:
            await self.engine.close()
        finally:
            await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        import ray

        for actor in self._actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        self.cluster.stop()


class RemoteRole(LocalRole):
    """A role's forward passes, done by its group of workers."""

    def __init__(self, trainer: RemoteTrainer, name: str, temperature: float, settings: RoleConfig, context_length: int):
        self.worker: Any = trainer
        self.name = name
        self.temperature = temperature
        self.settings = settings
        self.threads = True
        self.context_length = context_length


class RemoteSource:
    """The actor's group as sync plugins see it."""

    model = None

    def __init__(self, group: WorkerGroup):
        self.group = group

    async def run(self, function: str, **arguments: Any) -> list[Any]:
        """``"package.module:function"(weights, **arguments)`` on every rank; the first failure is raised at once."""
        import ray

        waiting = [asyncio.ensure_future(_wait(reference)) for reference in self.group.call("run", function, arguments)]
        try:
            return list(await asyncio.gather(*waiting))
        except ray.exceptions.RayError as error:
            raise plain_error(error, f"a worker of {self.group.name}") from error
        finally:
            for task in waiting:
                task.cancel()
                with contextlib.suppress(BaseException):
                    await task  # its own failure, seen


def _actor(cls: type, place: Place, group: Any, device: int, devices: int, config: RunConfig) -> Any:
    """The actor in the bundle of the place's device number ``device``, taking ``devices`` of its devices."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    engine = cls is EngineActor
    options: dict[str, Any] = {
        "num_cpus": devices,
        "num_gpus": devices if place.kind == "gpu" else 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group,
            placement_group_bundle_index=place.bundle_of(device),
            placement_group_capture_child_tasks=True,
        ),
        "max_restarts": config.ray.max_restarts if engine else 0,
    }
    if engine:
        options["max_concurrency"] = 10_000
    if config.ray.runtime_env:
        options["runtime_env"] = dict(config.ray.runtime_env)
    return ray.remote(cls).options(**options).remote()


def _found(role: RoleConfig) -> RoleConfig:
    """With the model's own directory, so that workers need neither this working directory nor to build the quickstart model."""
    source = find_model(role.model)
    if not source.local:
        return role
    directory = Path(source.path).expanduser().absolute()
    model = str(directory / source.gguf) if source.gguf else str(directory)
    tokenizer = role.tokenizer
    if tokenizer is not None and Path(tokenizer).expanduser().exists():
        tokenizer = str(Path(tokenizer).expanduser().absolute())
    return role.model_copy(update={"model": model, "tokenizer": tokenizer})


async def _wait(reference: Any) -> Any:
    return await reference
