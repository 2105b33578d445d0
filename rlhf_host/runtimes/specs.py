"""Plugins as other processes hear of them: by entry-point name, distribution version and options; made anew over there."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_host import __version__
from rlhf_host.config.plan import chosen
from rlhf_host.config.schema import PluginChoice, RunConfig
from rlhf_host.errors import PluginError
from rlhf_host.plugins.discovery import HOST, PluginInfo, discover
from rlhf_host.plugins.manager import Loaded, PluginManager
from rlhf_host.plugins.selection import PYTHON, build, find, load, read_options

WORKER_HOOKS = frozenset({"compute_loss", "batch_statistics", "importance_weights"})
"""Hooks that run on every rank: plugins with none of these stay with the controller."""


@dataclass(frozen=True, slots=True)
class PluginSpec:
    """Enough to find, check and make one plugin anywhere."""

    kind: str
    """The manager's."""
    group: str
    """The kind it is found under."""
    alias: str
    name: str
    distribution: str
    version: str
    options: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0


def worker_specs(config: RunConfig, manager: PluginManager) -> list[PluginSpec]:
    """The run's plugins that implement or wrap a worker hook, in selection order.

    Raises:
        PluginError: for one given as a Python object, which only this process has.
    """
    choices = {(item.kind, item.alias): item for item in chosen(config)}
    found = []
    for loaded in manager.loaded:
        item = choices.get((loaded.kind, loaded.alias))
        if item is not None and WORKER_HOOKS & set(manager.hooks(loaded.key)):
            if loaded.info.distribution == PYTHON:
                raise PluginError(
                    f"{loaded.kind} {loaded.alias!r} is a Python object, and workers in other processes find plugins by name:"
                    " install it as a plugin, or stay with --runtime local"
                )
            found.append(_spec(loaded.kind, item.group, loaded.alias, loaded.info, item.choice))
    return found


def protocol_spec(kind: str, choice: PluginChoice) -> PluginSpec:
    """An engine's or backend's."""
    info = find(kind, choice.plugin)
    return _spec(kind, kind, info.name, info, choice)


def _spec(kind: str, group: str, alias: str, info: PluginInfo, choice: PluginChoice) -> PluginSpec:
    return PluginSpec(kind, group, alias, info.name, info.distribution, info.version, dict(choice.options), choice.weight)


def locate_plugin(spec: PluginSpec, known: Sequence[PluginInfo] | None = None) -> PluginInfo:
    """The same plugin here.

    Raises:
        PluginError: it is not installed here, or in another version; both are named.
    """
    here = platform.node()
    try:
        info = find(spec.group, f"{spec.distribution}:{spec.name}", known)
    except PluginError as error:
        raise PluginError(
            f"{spec.group} {spec.name!r}: the controller has {spec.distribution} {spec.version}, and on {here} it cannot be used:"
            f" {error}"
        ) from error
    if info.version != spec.version:
        raise PluginError(
            f"{spec.group} {spec.name!r}: the controller has {spec.distribution} {spec.version}, and {here} has {info.version};"
            " install the same version on every node"
        )
    return info


def check_host(version: str) -> None:
    """Raises ``PluginError`` when this process has another version of the host than the controller."""
    if version != __version__:
        raise PluginError(
            f"the controller has {HOST} {version}, and {platform.node()} has {__version__}; install the same version on every node"
        )


def make_manager(specs: Iterable[PluginSpec]) -> PluginManager:
    """The worker's plugins. Raises ``PluginError`` for one that is not the controller's."""
    known = discover()
    loaded = []
    for spec in specs:
        info = locate_plugin(spec, known)
        loaded.append(Loaded(spec.kind, spec.alias, info, build(info, spec.options, spec.alias), spec.weight))
    return PluginManager(loaded)


def load_protocol(spec: PluginSpec) -> tuple[Any, Any]:
    """The class of an engine or backend and its options. Raises ``PluginError`` for one that is not the controller's."""
    info = locate_plugin(spec)
    cls: Any = load(info)
    return cls, read_options(info, cls, spec.options)
