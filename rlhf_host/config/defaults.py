"""What follows from the chosen engine, backend and runtime where nobody decided. Only this file knows any of them by name."""

from __future__ import annotations

import importlib.util

from rlhf_host.config.schema import PluginChoice, RunConfig, SyncChoice, defaults
from rlhf_host.errors import PluginError
from rlhf_host.plugins.discovery import HOST, PluginInfo, normalised

_LIBRARIES = {"vllm": "vllm", "deepspeed": "deepspeed", "ray": "ray"}
"""The host's own engines, backends and runtimes that need a library beyond torch → that library, and the extra of its name."""

LONG_S = 7 * 24 * 3600.0


def library(info: PluginInfo) -> str:
    """What the engine, backend or runtime stands on; empty where that is not known."""
    return _LIBRARIES.get(info.name, "torch") if normalised(info.distribution) == HOST else ""


def require_library(info: PluginInfo) -> None:
    """Raises ``PluginError`` with the line that installs it where the plugin's library is missing."""
    needed = library(info)
    if needed and importlib.util.find_spec(needed) is None:
        raise PluginError(f"{info.kind} {info.name!r} needs {needed}: pip install '{HOST}[{needed}]'")


def has_places(runtime: PluginChoice) -> bool:
    """Whether the runtime puts roles on devices and in processes of their own."""
    return _name(runtime) == "ray"


def own_weights(engine: PluginChoice, runtime: PluginChoice) -> str | None:
    """What gives engines weights of their own, which a sync must bring; ``None``: they sample from the trainer's module."""
    if has_places(runtime):
        return f"runtime {runtime.name}"
    return f"engine {engine.name}" if _name(engine) in _LIBRARIES else None


def default_sync(engine: PluginChoice, runtime: PluginChoice) -> str:
    """The sync that reaches these engines."""
    if has_places(runtime):
        return "broadcast"
    return "ipc" if own_weights(engine, runtime) else "in_process"


def unfit_sync(sync: SyncChoice, engine: PluginChoice, runtime: PluginChoice) -> str | None:
    """Why the sync cannot reach these engines, and what to do."""
    why = own_weights(engine, runtime)
    if not why or _name(sync) != "in_process":
        return None
    return (
        f"sync {sync.name} is for engines that sample from the trainer's own module, and with {why} they have weights of"
        " their own: leave --sync out, or set it to broadcast, ipc or checkpoint"
    )


def swap_for_debugging(config: RunConfig) -> None:
    """Plugins that leave this process give way to the default ones; nothing is late under a debugger."""
    for key in ("engine", "backend", "runtime"):
        if _name(getattr(config, key)) in _LIBRARIES:
            setattr(config, key, defaults()[key])
            config.sync, config.placement = SyncChoice(), []
    config.rollout.score_timeout_s = max(config.rollout.score_timeout_s, LONG_S)


def quickstart_model(engine: str) -> str:
    """The quickstart model that the engine can serve."""
    return "quickstart-wide" if engine.rpartition(":")[2] == "vllm" else "quickstart"


def _name(choice: PluginChoice) -> str:
    return choice.name.rpartition(":")[2]
