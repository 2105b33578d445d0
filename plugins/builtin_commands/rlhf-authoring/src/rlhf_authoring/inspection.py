"""Looking inside a plugin: importing it in a subprocess with a deadline, so that nothing it does can reach the caller."""

from __future__ import annotations

import dataclasses
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from rlhf_authoring.child import ChildFailed, answers
from rlhf_host import PluginError
from rlhf_host.commands import unreachable
from rlhf_host.installed import PROTOCOLS, PluginInfo, load, load_command
from rlhf_host.internals import imported, preset_file

DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class Inspection:
    """Findings of a plugin's import."""

    problem: str = ""
    """The reason why it cannot be used; empty when it can."""
    trace: str = ""
    """The traceback behind ``problem``, or what a crashed import wrote to stderr."""
    file: str = ""
    hooks: list[str] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)
    """Fields of ``options.Option``."""
    libraries: list[str] = field(default_factory=list)
    """The libraries in the traits of an engine, backend, runtime or kernels with default options."""


def look_inside(info: PluginInfo, deadline_s: float = DEADLINE_S) -> Inspection:
    """Import the plugin in a subprocess of at most ``deadline_s`` seconds: its hooks, options and file, or what is wrong."""
    if info.status in ("incompatible", "missing", "disabled"):
        return Inspection(problem=info.problem)
    try:
        (facts,) = answers(f"{__name__}:_inspect", dataclasses.asdict(info), deadline_s)
    except ChildFailed as failure:
        problem = f"importing {info.module} {failure}"
        return Inspection(problem=problem, trace="" if failure.timed_out else failure.trace)
    return Inspection(**facts)


def verify(plugins: Sequence[PluginInfo], deadline_s: float = DEADLINE_S) -> list[PluginInfo]:
    """The same plugins, those that cannot be imported or implement unknown hooks now ``broken``."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        inspections = list(pool.map(lambda info: look_inside(info, deadline_s), plugins))
    return [
        replace(info, status="broken", problem=inside.problem) if inside.problem and info.status in ("ok", "conflict") else info
        for info, inside in zip(plugins, inspections, strict=True)
    ]


def _inspect(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """In the child."""
    info = PluginInfo(**job)
    try:
        inspect = _INSPECT.get(info.kind, _inspect_class)
        inspection = inspect(info)
    except PluginError as error:
        trace = "".join(traceback.format_exception(error.__cause__)) if error.__cause__ else ""
        inspection = Inspection(problem=str(error).removeprefix(f"{info}: "), trace=trace)
    yield dataclasses.asdict(inspection)


def _inspect_class(info: PluginInfo) -> Inspection:
    from rlhf_host.installed import build, describe_options, options_model
    from rlhf_host.internals import Loaded, PluginManager, traits_of

    cls = load(info)
    file = _file_of(cls.__module__)
    options = [dataclasses.asdict(option) for option in describe_options(options_model(cls, info.kind))]
    if info.kind in PROTOCOLS:
        buildable = not any(field.is_required() for field in options_model(cls).model_fields.values())
        libraries = list(traits_of(info, build(info, {})).libraries) if buildable else []
        return Inspection(file=file, options=options, libraries=libraries)
    # The class stands in for an instance, which would need options: its functions carry the same marks.
    manager = PluginManager([Loaded(info.kind, info.name, info, cls)])
    hooks = manager.hooks(f"{info.kind}:{info.name}")
    problem = "" if hooks else f"{info.value} implements no hook: mark its methods with @hookimpl"
    return Inspection(problem=problem, file=file, hooks=hooks, options=options)


def _inspect_server(info: PluginInfo) -> Inspection:
    cls = load(info)
    lacking = [name for name in ("open", "close_session", "close") if not hasattr(cls, name)]
    problem = f"{info.value} has no {lacking[0]}: rlhf_host.protocols.Server says what a server has" if lacking else ""
    return Inspection(problem=problem, file=_file_of(cls.__module__))


def _inspect_data(info: PluginInfo) -> Inspection:
    plugin = imported(info)
    lacking = [name for name in ("refusals", "read", "look", "length") if not hasattr(plugin, name)]
    problem = f"{info.value} has no {lacking[0]}: rlhf_host.protocols.DataPlugin says what is needed" if lacking else ""
    return Inspection(problem=problem, file=_file_of(info.module))


def _inspect_command(info: PluginInfo) -> Inspection:
    load_command(info)
    return Inspection(problem=unreachable(info), file=_file_of(info.module))


def _inspect_preset(info: PluginInfo) -> Inspection:
    from ruamel.yaml import YAML, YAMLError

    file = preset_file(info)
    if file is None:
        return Inspection(problem=f"package {info.module} has no file {info.attribute}")
    try:
        content = YAML(typ="safe", pure=True).load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, YAMLError) as error:
        return Inspection(problem=f"{file}: {' '.join(str(error).split())}", file=str(file))
    problem = "" if isinstance(content, dict) else f"{file}: a preset is a mapping of settings"
    return Inspection(problem=problem, file=str(file))


_INSPECT = {"preset": _inspect_preset, "server": _inspect_server, "data": _inspect_data, "command": _inspect_command}
"""Kinds that have no hooks, options or traits → what looks at one of their plugins."""


def _file_of(module: str) -> str:
    """Returns where an imported module lies; empty where it has no file."""
    return getattr(sys.modules.get(module), "__file__", None) or ""
