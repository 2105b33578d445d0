"""Plugins as other processes hear of them: by entry-point name, distribution version and options; made anew over there."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_host import __version__
from rlhf_host.errors import PluginError
from rlhf_host.plugins.discovery import HOST, PROTOCOLS, PluginInfo
from rlhf_host.plugins.libraries import require_libraries
from rlhf_host.plugins.selection import build, find


@dataclass(frozen=True, slots=True)
class PluginSpec:
    """Enough to find, check and make one plugin anywhere."""

    kind: str
    """As the plugin manager calls it."""
    group: str
    """The kind it is found under."""
    alias: str
    name: str
    distribution: str
    version: str
    options: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0

    @classmethod
    def of(cls, info: PluginInfo, options: Mapping[str, Any]) -> PluginSpec:
        """Returns the specification of a plugin that the plugin manager does not have: an engine, a backend, a runtime, kernels."""
        return cls(info.kind, info.kind, info.name, info.name, info.distribution, info.version, dict(options))

    def locate(self, known: Sequence[PluginInfo] | None = None) -> PluginInfo:
        """The same plugin here.

        Raises:
            PluginError: it is not installed here, or in another version; both are named.
        """
        here = platform.node()
        wanted = f"{self.group} {self.name!r}: the controller has {self.distribution} {self.version}"
        try:
            info = find(self.group, f"{self.distribution}:{self.name}", known)
        except PluginError as error:
            raise PluginError(f"{wanted}, and on {here} it cannot be used: {error}") from error
        if info.version != self.version:
            raise PluginError(f"{wanted}, and {here} has {info.version}; install the same version on every node")
        return info

    def build(self, known: Sequence[PluginInfo] | None = None) -> Any:
        """The plugin, from its options. Raises ``PluginError`` for one that is not the controller's."""
        info = self.locate(known)
        plugin = build(info, self.options, self.alias)
        if self.kind in PROTOCOLS:
            require_libraries(info, plugin)
        return plugin


def check_host(version: str) -> None:
    """Raises ``PluginError`` when this process has another version of the host than the controller."""
    if version != __version__:
        raise PluginError(
            f"the controller has {HOST} {version}, and {platform.node()} has {__version__}; install the same version on every node"
        )
