"""Commands that nothing can reach: ``NAME.OTHER`` where ``rlhf NAME`` is no group of installed commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlhf_host.errors import PluginError
from rlhf_host.plugins.about import groups_nothing
from rlhf_host.plugins.discovery import PluginInfo, discover
from rlhf_host.plugins.selection import find, load_command


def with_reach(plugins: Sequence[PluginInfo]) -> list[PluginInfo]:
    """Returns the same plugins; commands that cannot be reached, as metadata and sources show it, are ``broken``."""
    commands = [info for info in discover() if info.kind == "command"]
    return [_judged(info, commands) for info in plugins]


def _judged(info: PluginInfo, commands: Sequence[PluginInfo]) -> PluginInfo:
    above = info.name.rpartition(".")[0]
    if info.kind != "command" or info.status != "ok" or not above:
        return info
    parents = [one for one in commands if one.name == above]
    if not parents:
        return replace(info, status="broken", problem=_no_command(info, above))
    if all(map(groups_nothing, parents)):
        return replace(info, status="broken", problem=_no_group(info, parents[0]))
    return info


def unreachable(info: PluginInfo) -> str:
    """Returns why no command line reaches a command, or an empty text. The command above it is imported."""
    above = info.name.rpartition(".")[0]
    if not above:
        return ""
    try:
        parent = find("command", above)
        if hasattr(load_command(parent), "installed"):
            return unreachable(parent)
    except PluginError as error:
        return f"{_words(info)} cannot be reached: {error}"
    return _no_group(info, parent)


def _no_command(info: PluginInfo, above: str) -> str:
    return (
        f"{_words(info)} cannot be reached, because no command {above!r} is installed: call the entry point NAME, or GROUP.NAME"
    )


def _no_group(info: PluginInfo, parent: PluginInfo) -> str:
    return (
        f"{_words(info)} cannot be reached, because {parent} is no group of installed commands: make one with"
        " @click.group(cls=rlhf_host.commands.CommandGroup)"
    )


def _words(info: PluginInfo) -> str:
    return f"rlhf {info.name.replace('.', ' ')}"
