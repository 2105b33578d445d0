"""Plugins given as Python objects: what a script or notebook passes in place of an installed plugin's name.

In the configuration such a plugin is called ``python:NAME``, so that whoever has only the configuration, as a resume from the
command line does, is told what is missing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeAlias

from rlhf_host import hookspecs
from rlhf_host.errors import PluginError
from rlhf_host.plugins.discovery import PluginInfo
from rlhf_host.plugins.hints import of_object
from rlhf_host.plugins.reward_functions import FunctionReward
from rlhf_host.plugins.selection import PYTHON, make, read_options

PluginObjects: TypeAlias = Mapping[tuple[str, str], Any]
"""(kind, name) → an instance or class with hooks or, as a reward, a function."""


def describe(kind: str, name: str, plugin: Any) -> PluginInfo:
    """The object as discovery describes an installed plugin."""
    home = plugin if hasattr(plugin, "__qualname__") else type(plugin)
    summary = " ".join((inspect.getdoc(plugin) or "").split("\n\n")[0].split())
    return PluginInfo(kind, name, PYTHON, "object", "any", "ok", summary, f"{home.__module__}:{home.__qualname__}")


def has_hooks(plugin: Any) -> bool:
    """Returns True if a class or instance implements any hook."""
    # dir() and not getmembers: reading a property may run anything.
    names = (name for name in dir(plugin) if not name.startswith("__"))
    return any(hasattr(inspect.getattr_static(plugin, name, None), f"{hookspecs.PROJECT}_impl") for name in names)


def make_object(info: PluginInfo, plugin: Any, options: Mapping[str, Any]) -> object:
    """The plugin: an instance as it is, a class made from its options, a function as a reward.

    Raises:
        PluginError: for an object that is no plugin.
    """
    who = f"{info.kind} {info.name!r} ({info.value})"
    if isinstance(plugin, type):
        if not has_hooks(plugin):
            raise PluginError(f"{who}: the class marks no method with @hookimpl{of_object(info.kind, plugin)}")
        return make(info, plugin, read_options(info, plugin, options))
    if has_hooks(plugin):
        return plugin
    if info.kind == "reward" and callable(plugin):
        return FunctionReward(plugin, info.name)
    raise PluginError(f"{who}: neither a plugin's name nor a class or object with methods marked @hookimpl")
