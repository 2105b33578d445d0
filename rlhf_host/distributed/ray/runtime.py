"""Roles and engines in Ray's processes: which process starts where, how weights reach engines, what is written."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from rlhf_host.distributed.ray.actors import BESIDE, WRITING, EngineActor, EngineInfo, WorkerActor
from rlhf_host.distributed.ray.cluster import RayCluster
from rlhf_host.distributed.ray.device_phases import DevicePhases
from rlhf_host.distributed.ray.engine_pool import EnginePool
from rlhf_host.distributed.ray.heartbeat import Heartbeat, Process
from rlhf_host.distributed.ray.placement import ROLLOUT, Kind, Place, cpu_shares, rank_order, shards_of, shortage, unsaid
from rlhf_host.distributed.ray.plugin import Ray, passed_on, placement
from rlhf_host.distributed.ray.setups import EngineSetup, RemoteRoles
from rlhf_host.distributed.ray.worker_group import RemoteTrainer, WorkerGroup, plain_error, wait_all
from rlhf_host.errors import RunError, UserError
from rlhf_host.protocols import NO_WEIGHTS, EngineTraits, Generator, RuntimeStart, SyncTarget, Writer
from rlhf_host.records.needs import AlgoNeeds
from rlhf_host.runtimes.building import with_tokenizer
from rlhf_host.training.trained_roles import check_state, role_views

log = logging.getLogger(__name__)

ATTEMPTS = 5
"""Maximum number of new attempts at a sync in which an engine died."""
START_S = 300.0
"""Seconds for a process to come up, including the installation of ``ray.runtime_env``."""

Group: TypeAlias = "tuple[WorkerGroup, RemoteRoles, list[Any], bool]"
"""Workers, their setup, references to their ``look``, and True if they are on GPUs."""


class RayRuntime:
    """Runtime in Ray's processes.

    Raises:
        UserError: the cluster cannot hold the placement, or something cannot be used over there; nothing is left running.
    """

    def __init__(self, options: Ray.Options, start: RuntimeStart):
        self._options, self._tokenizer = options, copy.deepcopy(start.tokenizer)
        self._bring, self._needs = start.bring, start.needs
        placement(start)  # what is wrong in itself is said before Ray starts
        self.cluster = RayCluster(options)
        self.cluster.start()
        self.about = self.cluster.about
        try:
            nodes = self.cluster.nodes()
            kind: Kind = "gpu" if any(node.gpu for node in nodes) else "cpu"
            if kind == "cpu" and not self.cluster.is_own:
                self._refuse_to_guess(unsaid(placement(start, "cpu"), placement(start, "gpu")))
            places = placement(start, kind)
            if self.cluster.is_own:  # of this machine alone, which does not grow
                remedy = "set --ray.num-cpus to count more" if kind == "cpu" else "join a larger cluster"
                if (problem := shortage(places, nodes, remedy=remedy)) is not None:
                    raise UserError(problem)
            self._start(start, places, self.cluster.reserve(places))
        except BaseException:
            self.cluster.stop()
            raise

    def _refuse_to_guess(self, places: Sequence[Place]) -> None:
        """Raises ``UserError`` if a run might be meant for GPUs that join the cluster later, and for CPUs as well."""
        if places:
            gpus, cpus = (" ".join(f"--placement {each.name}={each.size}:{kind}" for each in places) for kind in ("gpu", "cpu"))
            raise UserError(
                f"the Ray cluster {self._options.address} has no GPU now, and nothing says whether this run waits for some:"
                f" {gpus} waits (up to --ray.wait-s), and {cpus}, or --actor.device cpu, computes on CPUs"
            )

    def _start(self, start: RuntimeStart, places: Sequence[Place], reserved: Sequence[Any]) -> None:
        sampled = {ROLLOUT: "actor", **{need.name: need.name for need in start.needs.roles if need.generates}}
        setups = {} if start.engine is None else {name: EngineSetup.of(start, role) for name, role in sampled.items()}
        traits = EngineTraits() if start.engine is None else start.engine.build().traits
        shared = [place for place in places if place.shared]
        turns = traits.sleeps and bool(shared) and start.total_updates > 0
        # Every process is asked for before any is waited for: most of a start is imports.
        groups, engines, homes = self._processes(start, places, reserved, setups)
        self.pools = {name: EnginePool(own, traits, wait_s=self._options.wait_s) for name, own in engines.items()}
        self.followers: list[EnginePool] = []
        """Those that syncs bring the actor's weights to."""
        for name, pool in self.pools.items():
            pool.lives.homeless = lambda name: self.cluster.lacks_devices(homes[name])
            pool.lives.mixed = name in setups and setups[name].mixed is not None
            pool.lives.keeps = name != ROLLOUT and not pool.lives.mixed
            if not pool.lives.keeps:
                pool.resync = self._resync
                self.followers.append(pool)
        self.pool = self.pools[ROLLOUT]

        def begin(name: str) -> list[Any]:
            return [actor.start.remote(*arguments) for _, actor, arguments in engines[name]]

        on_gpus = any(place.kind == "gpu" for place in shared)
        if turns and not on_gpus:
            log.warning("engines and trainer share CPUs, where sleeping engines free nothing and a trainer's data stays")
        # Before workers load, and one after another, because an engine plans with the memory that is free.
        first = turns or on_gpus
        infos = {name: self._wait_for_engines(name, begin(name)) for name in engines} if first else {}
        starting = {} if first else {name: begin(name) for name in engines}
        turning = [pool for name, pool in self.pools.items() if turns and any(name in place.sampled for place in shared)]
        for pool in turning:
            pool.sleep(keep=False)
        loading = self._load(groups, placed=bool(start.placement))
        answers = [answer for group, references in loading for answer in wait_all(references, group.name)]
        lengths = {name: length for loaded in answers for name, length in loaded.context_lengths.items()}
        infos |= {name: self._wait_for_engines(name, references) for name, references in starting.items()}
        for name, own in infos.items():
            longest = lengths[sampled[name]]
            lengths[sampled[name]] = min([longest, *(info.context_length or longest for info in own)])
        self.exact = all(each.exact for each in itertools.chain(answers, *infos.values()))
        self.context_lengths = lengths
        self.engine = self.pool if setups else None
        self.engines: dict[str, Generator] = {name: pool for name, pool in self.pools.items() if name != ROLLOUT}
        for name, setup in setups.items():
            if setup.version != NO_WEIGHTS:
                self.pools[name].synced(setup.version)
        flops = next((loaded.flops for loaded in answers if "actor" in loaded.context_lengths), None)
        unit_rows = AlgoNeeds.of(start.needs).unit_rows
        self.trainer = RemoteTrainer([group for group, *_ in groups], unit_rows=unit_rows, flops=flops)
        self._phases: DevicePhases | None = None
        if turns:
            self._phases = DevicePhases(turning, self.trainer.trained)
            self.trainer.before = self._phases.train
            for pool in turning:
                pool.before_sampling, pool.lives.restart = self._phases.sample, self._phases.restart
        self._actors = [actor for group, *_ in groups for actor in group.actors]
        self._actors += [actor for own in engines.values() for _, actor, _ in own]
        self.source = RemoteSource(self.trainer.by_role["actor"], None if self._phases is None else self._phases.back)
        self._lock = asyncio.Lock()
        self._version = NO_WEIGHTS
        self._heartbeat = Heartbeat(self.processes, self._options.stall_s)

    def _wait_for_engines(self, name: str, starting: Sequence[Any]) -> list[EngineInfo]:
        infos: list[EngineInfo] = wait_all(starting, "the engines")
        self.pools[name].lives.start(infos)
        return infos

    def _processes(
        self, start: RuntimeStart, places: Sequence[Place], reserved: Sequence[Any], setups: Mapping[str, EngineSetup]
    ) -> tuple[list[Group], dict[str, list[tuple[str, Any, tuple[Any, ...]]]], dict[str, Any]]:
        """Makes the processes of workers and engines. Returns groups, engines of ``rollout`` and of each frozen role as
        ``EnginePool`` takes them, and the bundles of each engine.
        """
        groups: list[Group] = []
        engines: dict[str, list[tuple[str, Any, tuple[Any, ...]]]] = {name: [] for name in (ROLLOUT, *setups)}
        homes: dict[str, Any] = {}
        for place, bundles in zip(places, reserved, strict=True):
            gpu, looks = place.kind == "gpu", []
            if place.roles:
                setup = RemoteRoles.of(start, place.roles)
                actors = [_actor(WorkerActor, place, bundles, device, 1, self._options) for device in range(place.devices)]
                views = role_views(setup.roles)  # compute with a trained role's module
                trainable = tuple(need.name for need, _ in setup.roles if need.trainable or need.name in views)
                group = WorkerGroup("+".join(place.roles), actors, place.roles, trainable, shards_of(place, start))
                looks = group.call("look")
                groups.append((group, setup, looks, gpu))
            for name, devices in itertools.product(place.sampled, place.engines):
                share = 0 if place.shared else len(devices)
                actor = _actor(EngineActor, place, bundles, devices[0], share, self._options)
                gpus: list[str] | None = None if gpu else []
                if gpu and place.shared:  # Ray has given the engine none: it is told which its workers have
                    seen = wait_all([looks[device] for device in devices], place.name, within_s=START_S)
                    gpus = [own for look in seen for own in look["gpus"]]
                engine = f"{len(engines[name])}" + ("" if name == ROLLOUT else f" of {name}")
                homes[engine] = bundles
                engines[name].append((engine, actor, (setups[name], start.train.threads, gpus)))
        return groups, engines, homes

    def _load(self, groups: Sequence[Group], *, placed: bool) -> list[tuple[WorkerGroup, list[Any]]]:
        """Gives ranks to processes and makes them load. Returns references to their answers.

        Args:
            placed: the user has said which roles have which devices.
        """
        seen = [wait_all(looks, group.name, within_s=START_S) for group, _, looks, _ in groups]
        shares = iter(cpu_shares([look["node"] for own in seen for look in own], self.cluster.cpus()))
        loading = []
        for (group, setup, _, gpu), own in zip(groups, seen, strict=True):
            cpus: list[int | None] = [next(shares) for _ in own]
            if placed and not gpu:  # the devices are CPUs, so a placement says how many a worker has
                cpus = [None] * len(own)
            order = rank_order([look["node"] for look in own], [look["gpus"] for look in own])
            group.actors[:] = [group.actors[number] for number in order]
            first, size = own[order[0]], len(order)
            each = [
                (setup, rank, size, first["address"], first["port"], group.parts, gpu, cpus[number])
                for rank, number in enumerate(order)
            ]
            loading.append((group, group.call_each("start", each)))
        return loading

    def processes(self) -> Iterator[Process]:
        """Yields the processes that are up."""
        for group in self.trainer.groups:
            for actor in group.actors:
                yield Process(f"a worker of {group.name}", actor, actor.alive.options(concurrency_group=BESIDE).remote)
        for seat in (seat for pool in self.pools.values() for seat in pool.lives.up):
            yield Process(f"engine {seat.name}", seat.actor, seat.actor.alive.remote, restarts=True)

    @property
    def targets(self) -> list[SyncTarget]:
        """The engines that are up and get the actor's weights."""
        return [target for pool in self.followers for target in pool.lives.targets]

    async def sync(self, version: int) -> None:
        """Brings the actor's weights to the engines as ``version``. An engine that dies meanwhile gets them when it is back."""
        async with self._lock:
            self._version = version
            await self._sync()
            self.trainer.ahead = False

    async def _resync(self) -> None:
        async with self._lock:
            # Between an update and its sync the weights are no version; that sync will reach the new engine too.
            with self.trainer.still:
                # Beside engines at work there is no room for the trainer's data.
                at_work = self._phases is not None and any(pool.at_work for pool in self.pools.values())
                waits = self.trainer.ahead or at_work
                if not waits and self._version >= 0 and any(each.engine.version != self._version for each in self.targets):
                    await self._sync()

    async def _sync(self) -> None:
        if self._phases is None:
            await self._bring_weights()
        else:
            await asyncio.to_thread(self._phases.send)
            self._phases.keep = True  # a proof computes between two probes
            try:
                await self._bring_weights()
            finally:
                self._phases.keep = False
            await asyncio.to_thread(self._phases.sample)
        for pool in self.followers:
            pool.synced(self._version)

    async def _bring_weights(self) -> None:
        for pool in self.followers:
            pool.coming = self._version
        for attempt in range(ATTEMPTS):
            engines = [target.engine for target in self.targets]
            try:
                await self._bring(self.targets, self.source, self._version)
                break
            except RunError:
                if [target.engine for target in self.targets] == engines or attempt + 1 == ATTEMPTS:
                    raise

    def save_role(self, name: str, directory: Path) -> Writer:
        write = self._copied([self.trainer.by_role[name]], f"role {name}", "copy_role", name, str(directory.absolute()))
        return with_tokenizer(write, self._tokenizer, directory)

    def save_state(self, directory: Path) -> Writer:
        return self._copied(self.trainer.trained, "state", "copy_state", str(directory.absolute()))

    def load_state(self, directory: Path) -> None:
        check_state(directory, self._needs)
        self._everywhere(self.trainer.trained, "of_roles", "load_state", str(directory.absolute()))

    def _copied(self, groups: Sequence[WorkerGroup], name: str, method: str, *arguments: str) -> Writer:
        """Makes every worker copy. Returns a function that makes them write while they compute."""
        if self._phases is not None:
            self._phases.train()  # what is away from the devices cannot be gathered
        self._everywhere(groups, "copy", name, method, *arguments)
        return partial(self._everywhere, groups, "write", name, thread=WRITING)

    @staticmethod
    def _everywhere(groups: Sequence[WorkerGroup], method: str, *arguments: str, thread: str | None = None) -> None:
        for group in groups:
            wait_all(group.call(method, *arguments, thread=thread), group.name)

    async def close(self) -> None:
        try:
            await asyncio.gather(*(pool.close() for pool in self.pools.values()))
        finally:
            await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        import ray

        self._heartbeat.stop()
        for actor in self._actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        self.cluster.stop()


class RemoteSource:
    """The actor's group as sync plugins see it. ``before`` is called in a thread before a function runs."""

    def __init__(self, group: WorkerGroup, before: Callable[[], None] | None = None):
        self.group, self._before = group, before

    async def run(self, function: str, **arguments: Any) -> list[Any]:
        """Runs ``"package.module:function"(weights, **arguments)`` on every rank; raises the first failure at once."""
        import ray

        if self._before is not None:
            await asyncio.to_thread(self._before)
        waiting = [asyncio.ensure_future(reference) for reference in self.group.call("of_roles", "run", function, arguments)]
        try:
            return list(await asyncio.gather(*waiting))
        except ray.exceptions.RayError as error:
            raise plain_error(error, f"a worker of {self.group.name}") from error
        finally:
            for task in waiting:
                task.cancel()
                with contextlib.suppress(BaseException):
                    await task  # its own failure, seen


def _actor(cls: type, place: Place, group: Any, device: int, devices: int, settings: Ray.Options) -> Any:
    """Returns the actor in the bundle of the place's device number ``device``, using ``devices`` of its devices."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    options: dict[str, Any] = {
        "num_cpus": devices,
        "num_gpus": devices if place.kind == "gpu" else 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, place.bundle_of(device), True),
    }
    if cls is EngineActor:
        options |= {"max_restarts": settings.max_restarts, "max_concurrency": 10_000}
    else:
        options["concurrency_groups"] = {BESIDE: 1, WRITING: 1}
    if settings.runtime_env:
        options["runtime_env"] = passed_on(settings.runtime_env)
    return ray.remote(**options)(cls).remote()
