"""Plugins that are chosen: enough to make them here, and anew in other processes, where the same version must be installed."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_host.errors import PluginError
from rlhf_host.plugins.discovery import PROTOCOLS, PluginInfo
from rlhf_host.plugins.libraries import require_libraries
from rlhf_host.plugins.python_objects import make_object
from rlhf_host.plugins.selection import build, find


@dataclass(frozen=True, slots=True)
class PluginSpec:
    """One chosen plugin."""

    kind: str
    """Kind, as the plugin manager calls it; ``info.kind`` is the one that it is found under."""
    alias: str
    info: PluginInfo
    """The plugin, as the controller found it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    given: Any = None
    """The class or object itself, where it was given in Python: only this process has it."""

    @property
    def name(self) -> str:
        return self.info.name

    @classmethod
    def of(cls, info: PluginInfo, options: Mapping[str, Any]) -> PluginSpec:
        """Returns the specification of a plugin that the plugin manager does not have: an engine, a backend, a runtime, kernels."""
        return cls(info.kind, info.name, info, options)

    def locate(self, known: Sequence[PluginInfo] | None = None) -> PluginInfo:
        """The same plugin here.

        Raises:
            PluginError: it is not installed here, or in another version; both are named.
        """
        if self.given is not None:
            return self.info
        here, theirs = platform.node(), self.info
        wanted = f"{theirs.kind} {theirs.name!r}: the controller has {theirs.source}"
        try:
            info = find(theirs.kind, f"{theirs.distribution}:{theirs.name}", known)
        except PluginError as error:
            raise PluginError(f"{wanted}, and on {here} it cannot be used: {error}") from error
        if info.version != theirs.version:
            raise PluginError(f"{wanted}, and {here} has {info.version}; install the same version on every node")
        return info

    def build(self, known: Sequence[PluginInfo] | None = None) -> Any:
        """The plugin, from its options. Raises ``PluginError`` for one that is not the controller's."""
        if self.given is not None:
            return make_object(self.info, self.given, self.options)
        info = self.locate(known)
        plugin = build(info, self.options, self.alias)
        if self.kind in PROTOCOLS:
            require_libraries(info, plugin)
        return plugin
