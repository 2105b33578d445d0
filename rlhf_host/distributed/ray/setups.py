"""Descriptions from which another process builds roles, or the run's engine.

Importing it loads no torch, so a process can choose its device first.
"""

from __future__ import annotations

import dataclasses
import platform
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_host import __version__
from rlhf_host.config.schema import RoleConfig
from rlhf_host.errors import LostError, PluginError, RunError, UserError, blaming, in_one_line
from rlhf_host.hookspecs import RULES
from rlhf_host.plugins.discovery import HOST
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.plugins.selection import PYTHON
from rlhf_host.plugins.specs import PluginSpec
from rlhf_host.protocols import NO_WEIGHTS, Compute, Engine, EngineStart, Ranks, RuntimeStart
from rlhf_host.records.needs import RoleNeed
from rlhf_host.runtimes.building import Roles, chosen_kernels, save_for_engine
from rlhf_host.scratch import Scratch


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRoles:
    """Some of a run's roles, to be built in another process; can be pickled."""

    start: RuntimeStart
    """The start of these roles, without what stays with the controller: plugins, tokenizer, ``bring``."""
    plugins: Sequence[PluginSpec]
    host_version: str = __version__

    @classmethod
    def of(cls, start: RuntimeStart, names: Iterable[str] | None = None) -> RemoteRoles:
        """Returns these roles.

        Args:
            names: names of the roles; default: all.

        Raises:
            PluginError: a plugin that workers need cannot be sent to another process.
        """
        apart: Any = None
        roles = {name: _located(start.roles[name]) for name in (start.roles if names is None else names)}
        sent = dataclasses.replace(start, roles=roles, hooks=apart, tokenizer=apart, bring=apart)
        return cls(start=sent, plugins=worker_specs(start.hooks) if start.total_updates else ())

    @property
    def roles(self) -> list[tuple[RoleNeed, RoleConfig]]:
        return [(need, self.start.roles[need.name]) for need in self.start.needs.roles if need.name in self.start.roles]

    def build(self, ranks: Ranks | None = None) -> Roles:
        """Returns the roles, with plugins made anew.

        Raises:
            PluginError: a plugin, or the host, is not that of the controller.
            UserError: models or options that cannot be used here.
        """
        check_host(self.host_version)
        return Roles(dataclasses.replace(self.start, hooks=PluginManager.from_specs(self.plugins)), ranks)


def worker_specs(manager: PluginManager) -> list[PluginSpec]:
    """Returns the plugins that implement or wrap a worker hook, in selection order, for other processes.

    Raises:
        PluginError: for one given as a Python object, which only this process has.
    """
    needed = [item for item in manager.loaded if any(RULES[hook].where == "worker" for hook in manager.hooks(item.key))]
    for item in needed:
        if item.info.distribution == PYTHON:
            raise PluginError(
                f"{item.kind} {item.alias!r} is a Python object, and workers in other processes find plugins by name: install"
                " it as a plugin, or stay in this process"
            )
    return [PluginSpec(item.kind, item.alias, item.info, item.options, item.weight) for item in needed]


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
    mixed: tuple[RoleConfig, float] | None = None
    """A frozen model and its share, if the engine samples from its mixture with the own one."""
    host_version: str = __version__

    @classmethod
    def of(cls, start: RuntimeStart, name: str = "actor") -> EngineSetup:
        """Returns the engine of the actor, or of a frozen role that generates. A mixture has the actor's weights from syncs."""
        assert start.engine is not None
        share = next((need.mixes for need in start.needs.roles if need.name == name), None)
        frozen = name != "actor" and share is None
        version = 0 if frozen or not start.total_updates else NO_WEIGHTS
        role = _located(start.roles[name if frozen else "actor"])
        if version == NO_WEIGHTS:  # a sync brings weights with the adapter merged
            role = role.base
        return cls(
            engine=start.engine,
            kernels=start.kernels,
            role=role,
            version=version,
            adapter_rank=0 if frozen else start.adapter_rank,
            mixed=None if share is None else (_located(start.roles[name]), share),
        )


def start_engine(setup: EngineSetup, compute: Compute) -> Engine:
    """Starts the engine. Raises ``UserError`` for a plugin, model or options that cannot be used here."""
    from rlhf_host.engines.mixed import MixedKernels
    from rlhf_host.models.loading import load_model, load_tokenizer, model_directory

    check_host(setup.host_version)
    plugin, tokenizer, role = setup.engine.build(), load_tokenizer(setup.role), setup.role
    with Scratch("rlhf-engine-", tempfile.gettempdir()) as directory:
        model: Any
        if plugin.traits.takes == "module":
            if setup.version == NO_WEIGHTS and role.dtype == "auto":  # trained weights are float32, and so is their copy
                role = role.model_copy(update={"dtype": "float32"})
            model = load_model(role)
        elif (model := model_directory(role)) is None:
            with_weights = setup.version >= 0 or setup.adapter_rank > 0
            model = save_for_engine(load_model(role), tokenizer, directory, with_weights=with_weights)
        kernels = chosen_kernels(setup.kernels)
        if setup.mixed is not None:
            other, share = setup.mixed
            kernels = MixedKernels(kernels, load_model(other), 1 - share)
        with blaming(f"engine {setup.engine.name}", "start"):
            settings: dict[str, Any] = {"version": setup.version, "adapter_rank": setup.adapter_rank}
            return plugin.start(EngineStart(model=model, tokenizer=tokenizer, compute=compute, kernels=kernels, **settings))


def _located(role: RoleConfig) -> RoleConfig:
    """Returns the settings with the model's absolute directory, so that no process needs this working directory, or to build
    the quickstart model.
    """
    from rlhf_host.models.locations import find_model, with_base

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


def check_host(version: str) -> None:
    """Raises ``PluginError`` when this process has another version of the host than the controller."""
    if version != __version__:
        raise PluginError(
            f"the controller has {HOST} {version}, and {platform.node()} has {__version__}; install the same version on every node"
        )
