"""Parts of a runtime's processes: the roles of one process, and an engine, built from specs in any process.

Public, for runtimes of other distributions too. Importing it loads no torch, so a device can be chosen first.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_host import __version__
from rlhf_host.config.schema import RoleConfig, TrainConfig
from rlhf_host.errors import LostError, RunError, UserError, blaming, in_one_line
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.plugins.specs import PluginSpec, check_host
from rlhf_host.protocols import NO_WEIGHTS, Compute, Engine, EngineStart, Kernels, RuntimeStart, Writer
from rlhf_host.records.needs import Needs, RoleNeed
from rlhf_host.scratch import Scratch
from rlhf_host.training.trained_roles import check_state, in_backend, role_views

__all__ = ["EngineSetup", "Roles", "RolesSetup", "check_state", "plain", "start_engine"]

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from rlhf_host.backends.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RolesSetup:
    """All data needed to build some of a run's roles."""

    roles: Sequence[tuple[RoleNeed, RoleConfig]]
    needs: Needs
    plugins: Sequence[PluginSpec] | PluginManager
    """Plugins. As specs, the setup can be pickled and the roles built in another process."""
    backend: PluginSpec
    kernels: Sequence[PluginSpec]
    train: TrainConfig
    total_updates: int
    adapter_rank: int = 0
    """Rank of adapters, as in ``EngineStart``."""
    seed: int = 0
    host_version: str = __version__

    @classmethod
    def of(cls, start: RuntimeStart, names: Iterable[str] | None = None, *, here: bool = False) -> RolesSetup:
        """Returns the setup.

        Args:
            names: names of the roles; default: all.
            here: the roles are built in the controller's own process, with its plugins.

        Raises:
            PluginError: a plugin that workers need cannot be sent to another process.
        """
        needs = [need for need in start.needs.roles if names is None or need.name in set(names)]
        apart = start.hooks.specs() if start.total_updates and not here else ()
        return cls(
            roles=[(need, start.roles[need.name] if here else located(start.roles[need.name])) for need in needs],
            needs=start.needs,
            plugins=start.hooks if here else apart,
            backend=start.backend,
            kernels=start.kernels,
            train=start.train,
            total_updates=start.total_updates,
            adapter_rank=start.adapter_rank,
            seed=start.seed,
        )


class Roles:
    """The models of one process: ``worker`` computes with them and trains them, ``weights`` gives the actor's weights to syncs.

    Use it on one thread.

    Args:
        ranks: the processes that train the same roles; default: only this one.

    Raises:
        UserError: models, options or versions that cannot be used here.
    """

    def __init__(self, setup: RolesSetup, ranks: Ranks | None = None):
        from rlhf_host.backends.ranks import Ranks
        from rlhf_host.backends.weights import adapter_buckets
        from rlhf_host.models.adapter_files import load_adapter
        from rlhf_host.models.loading import context_length, load_model
        from rlhf_host.models.pieces import load_in_pieces
        from rlhf_host.training.following import refuse_different
        from rlhf_host.training.role import Role
        from rlhf_host.training.worker import Worker
        from rlhf_host.weight_sync.local_source import LocalWeights

        check_host(setup.host_version)
        hooks = setup.plugins if isinstance(setup.plugins, PluginManager) else PluginManager.from_specs(setup.plugins)
        backend, ranks = setup.backend.build(), Ranks() if ranks is None else ranks
        self.kernels = chosen_kernels(setup.kernels)
        views, models, pieces = role_views(setup.roles), {}, {}
        handled = {each.name for each, own in setup.roles if in_backend(each, own, backend.traits, ranks.processes)}
        for need, settings in setup.roles:
            if need.name in views:
                continue
            wanted = need.name in handled and backend.traits.in_pieces
            if wanted and (found := load_in_pieces(settings, head=need.head, trainable=need.trainable)) is not None:
                pieces[need.name], models[need.name] = found, found.model
            else:
                models[need.name] = load_model(settings, head=need.head, trainable=need.trainable)
                if wanted and ranks.process == 0 and ranks.processes > 1:
                    log.warning("%s: this model cannot be read in pieces, so each rank loads all of it first", need.name)
            if need.trainable and ranks.rank == 0:
                _report_frozen(need.name, models[need.name])
        for need, _ in setup.roles:
            if need.moves:  # before a backend splits one of them
                assert need.source is not None
                refuse_different(need.name, models[need.name], need.source, models[need.source])
        for view in views.values():
            if view.start is not None and not view.live:
                load_adapter(models[view.source], view.start, view.adapter)
        roles = {
            need.name: Role.of(
                need.name,
                models[need.name],
                setup.train,
                kernels=self.kernels,
                backend=backend if need.name in handled else None,
                settings=settings,
                total_updates=setup.total_updates - need.idle_steps * setup.train.updates_per_batch,
                ranks=ranks,
                trainer=f"backend {setup.backend.name}",
                pieces=pieces.pop(need.name, None),
                trainable=need.trainable,
            )
            for need, settings in setup.roles
            if need.name not in views
        }
        for name, view in views.items():
            source = roles[view.source]
            roles[name] = source.itself(name) if view.live else source.under(name, view.start and view.adapter)
        self.worker = Worker(roles, hooks, setup.train, setup.needs, ranks, seed=setup.seed)
        self.backends = {name: role.backend for name, role in roles.items() if role.backend is not None}
        self.models = {name: role.passes.model for name, role in roles.items()}
        self.context_lengths = {name: context_length(model) for name, model in self.models.items()}
        """Longest row of each role, in tokens."""
        self.exact = all(role.passes.exact and (role.backend is None or role.backend.exact) for role in roles.values())
        """True if everything computes in 32 bits."""
        self.flops = roles["actor"].passes.model_flops if "actor" in roles else None
        self.weights: LocalWeights | None = None
        if (actor := self.models.get("actor")) is not None:
            weights = self.backends["actor"].weights if "actor" in self.backends else None
            everywhere = backend.traits.everywhere
            if setup.adapter_rank:
                weights, everywhere = partial(adapter_buckets, actor), False
            self.weights = LocalWeights(actor, weights, rank=ranks.process, size=ranks.processes, everywhere=everywhere)

    def run(self, function: str, arguments: Mapping[str, Any]) -> Any:
        """Does the work of ``WeightSource.run`` on one rank. On its own thread, it may wait for other ends of a sync."""
        from rlhf_host.engines.loading import call_by_path

        return call_by_path(function, self.weights, arguments)

    def save_role(self, name: str, directory: str | Path) -> None:
        """Writes the role in Hugging Face format, without tokenizer. Collective."""
        self.copy_role(name, directory)()

    def copy_role(self, name: str, directory: str | Path) -> Writer:
        """Copies what ``save_role`` writes. Collective. Returns a function that writes it, for any thread of this process."""
        from rlhf_host.models.loading import copy_model, quiet_transformers

        if name not in self.backends:  # it moves with one that is trained, and every rank has all of it
            copied = None if self.worker.ranks.process else copy_model(self.models[name], directory)
            return partial(_write, [(f"role {name}", "save", copied)])
        trainer = self.worker.roles[name].trainer
        with quiet_transformers(), blaming(trainer, "save_model"):
            write = self.backends[name].save_model(Path(directory))
        return partial(_write, [(trainer, "save_model", write)])

    def save_state(self, directory: str | Path) -> None:
        """Writes optimizers and schedules, a folder for each role. Collective."""
        self.copy_state(directory)()

    def copy_state(self, directory: str | Path) -> Writer:
        """Copies what ``save_state`` writes, like ``copy_role``."""
        writers = []
        for name, backend in self.backends.items():
            Path(directory, name).mkdir(exist_ok=True)
            trainer = self.worker.roles[name].trainer
            with blaming(trainer, "save"):
                writers.append((trainer, "save", backend.save(Path(directory, name))))
        return partial(_write, writers)

    def load_state(self, directory: str | Path) -> None:
        """Loads optimizers and schedules. Collective."""
        for name, backend in self.backends.items():
            with blaming(self.worker.roles[name].trainer, "load"):
                backend.load(Path(directory, name))


def _write(writers: list[tuple[str, str, Writer | None]]) -> None:
    """Calls each writer, and frees its copy."""
    while writers:
        trainer, method, write = writers.pop(0)
        if write is not None:
            with blaming(trainer, method):
                write()


def _report_frozen(name: str, model: Any) -> None:
    """Logs how many weights are trained, if not all."""
    whole, trained = model.num_parameters(), model.num_parameters(only_trainable=True)
    if trained < whole:
        log.warning("%s: %s of %s weights are trained (%.2f %%)", name, f"{trained:,}", f"{whole:,}", 100 * trained / whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """All data needed to start the run's engine in another process, with its own weights; can be pickled."""

    engine: PluginSpec
    kernels: Sequence[PluginSpec]
    role: RoleConfig
    version: int
    """Version of the weights in ``role.model``; -1: a sync will bring others."""
    adapter_rank: int = 0
    """Rank of adapters, as in ``EngineStart``."""
    host_version: str = __version__

    @classmethod
    def of(cls, start: RuntimeStart) -> EngineSetup:
        assert start.engine is not None
        version = NO_WEIGHTS if start.total_updates else 0
        role = located(start.roles["actor"])
        if version == NO_WEIGHTS:  # a sync brings weights with the adapter merged
            role = role.base
        rank = start.adapter_rank
        return cls(engine=start.engine, kernels=start.kernels, role=role, version=version, adapter_rank=rank)


def with_tokenizer(write: Writer, tokenizer: Any, directory: Path) -> Writer:
    """Returns a function that writes a role, and then the tokenizer beside it. Pass a copy of the tokenizer: others use theirs
    meanwhile.
    """
    from rlhf_host.models.loading import save_tokenizer

    def both() -> None:
        write()
        save_tokenizer(tokenizer, directory)

    return both


def start_engine(setup: EngineSetup, compute: Compute) -> Engine:
    """Starts the engine. Raises ``UserError`` for a plugin, model or options that cannot be used here."""
    from rlhf_host.models.loading import load_model, load_tokenizer, model_directory

    check_host(setup.host_version)
    plugin, tokenizer, role = setup.engine.build(), load_tokenizer(setup.role), setup.role
    with Scratch("rlhf-engine-", tempfile.gettempdir()) as directory:
        model: Any
        if plugin.traits.takes == "module":
            # Trained weights are float32, and so must be what they are copied into.
            model = load_model(role.model_copy(update={"dtype": "float32" if role.dtype == "auto" else role.dtype}))
        elif (model := model_directory(role)) is None:
            with_weights = setup.version >= 0 or setup.adapter_rank > 0
            model = save_for_engine(load_model(role), tokenizer, directory, with_weights=with_weights)
        kernels = chosen_kernels(setup.kernels)
        with blaming(f"engine {setup.engine.name}", "start"):
            settings: dict[str, Any] = {"version": setup.version, "adapter_rank": setup.adapter_rank}
            return plugin.start(EngineStart(model=model, tokenizer=tokenizer, compute=compute, kernels=kernels, **settings))


def save_for_engine(model: Any, tokenizer: Any, directory: Path, *, with_weights: bool) -> Path:
    """Writes a model directory for an engine with its own weights, in ordinary form."""
    from rlhf_host.models import quantized
    from rlhf_host.models.loading import quiet_transformers, save_tokenizer

    with quiet_transformers():
        if with_weights:
            quantized.widened(model).save_pretrained(directory)
        else:
            quantized.plain_config(model).save_pretrained(directory)
            model.generation_config.save_pretrained(directory)
        save_tokenizer(tokenizer, directory)
    return directory


def chosen_kernels(specs: Sequence[PluginSpec]) -> Kernels:
    """Returns the run's kernels, for this process: what the first of the plugins chooses among all; without any, the plain path."""
    from rlhf_host.engines.plain_path import PlainKernels

    candidates = [(spec.name, spec.build()) for spec in specs]
    for name, plugin in candidates[:1]:
        with blaming(f"kernels {name}", "choose"):
            kernels: Kernels = plugin.choose(candidates, PlainKernels())
            return kernels
    return PlainKernels()


def located(role: RoleConfig) -> RoleConfig:
    """Returns the settings with the model's absolute directory, so that no process needs this working directory, or to build
    the quickstart model.
    """
    from rlhf_host.models.places import find_model, with_base

    role = with_base(role)
    if role.adapter is not None:
        role = role.model_copy(update={"adapter": str(Path(role.adapter).expanduser().absolute())})
    source = find_model(role.model)
    if not source.local:
        return role
    directory = Path(source.path).expanduser().absolute()
    changes: dict[str, Any] = {"model": str(directory / source.gguf) if source.gguf else str(directory)}
    if role.tokenizer is not None and Path(role.tokenizer).expanduser().exists():
        changes["tokenizer"] = str(Path(role.tokenizer).expanduser().absolute())
    return role.model_copy(update=changes)


def plain(error: Exception) -> Exception:
    """Returns an error that can be sent to another process: of the project's own kinds, with only the text of ``error``."""
    for kind in (UserError, LostError, RunError):
        if isinstance(error, kind):
            return kind(str(error))
    return RunError(in_one_line(error))
