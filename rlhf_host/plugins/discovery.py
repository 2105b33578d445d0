"""Discovery: which plugins are installed, from distribution metadata alone. Nothing of a plugin is imported."""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from email.message import Message
from email.parser import HeaderParser
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from importlib_metadata import Distribution, EntryPoint, distributions

from rlhf_host import __version__
from rlhf_host.once import once

HOST = "rlhf-host"

GROUPS: dict[str, str] = {
    "algo": "rlhf.algos",
    "reward": "rlhf.rewards",
    "agent": "rlhf.agents",
    "extension": "rlhf.extensions",
    "tasks": "rlhf.tasks",
    "weight_sync": "rlhf.weight_sync",
    "tracker": "rlhf.trackers",
    "preset": "rlhf.presets",
    "engine": "rlhf.engines",
    "backend": "rlhf.backends",
    "runtime": "rlhf.runtimes",
    "kernels": "rlhf.kernels",
    "server": "rlhf.servers",
    "data": "rlhf.data",
    "command": "rlhf.commands",
}
"""Kind → entry-point group. What else is said of a kind's plugins is in ``GROUP.spellings`` and ``GROUP.recommended``
(``plugins.spellings``, ``plugins.recommended``)."""

Unchosen: TypeAlias = Literal["hint", "reward_form", "forecast", "afterword", "note", "step_model", "memory_plan", "python"]

UNCHOSEN = {kind: f"rlhf.{kind}s" for kind in get_args(Unchosen)} | {"python": "rlhf.python"}
"""The same for what explains unknown names (``plugins.hints``), for what calls reward functions of other projects
(``plugins.reward_functions``), for what a dry run asks about the run and what is said after a run (``cli.dry_run``), for what is
known of a plugin that is shown (``cli.plugins_show``), for what has models of a run's steps (``runs.step_models``), for what
decides what passes keep (``models.memory_plans``), and for names that packages add to ``rlhf_host``. Nobody chooses one, so they
are no kinds of plugins.
"""

PROTOCOLS = ("engine", "backend", "runtime", "kernels", "weight_sync")
"""Kinds that have a protocol instead of hooks."""

WITHOUT_OPTIONS = ("preset", "server", "data", "command")
"""Kinds that are chosen by being there: a file, a ``protocols.Server``, a ``protocols.DataPlugin``, a ``click.Command``."""

HOOKED = tuple(kind for kind in GROUPS if kind not in (*PROTOCOLS, *WITHOUT_OPTIONS))
"""Kinds that have hooks."""

DISABLE = "RLHF_DISABLE_PLUGINS"
"""Environment variable: plugins to leave out, ``name`` or ``distribution:name``, with commas between."""

Status: TypeAlias = Literal["ok", "incompatible", "conflict", "missing", "broken", "disabled"]


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """One entry point, as its distribution's metadata describes it."""

    kind: str
    name: str
    distribution: str
    version: str
    api: str
    """The distribution's requirement on rlhf-host: ``>=1,<2``; ``any`` if it has no range, ``unstated`` if there is none."""
    status: Status
    summary: str
    value: str
    """``module:attribute``; of presets ``package:file``."""
    problem: str = ""
    """The reason why ``status`` is not ok."""
    spellings: tuple[tuple[str, str], ...] = ()
    """Forms that choose the plugin instead of its name, each with the options that it sets: ``(".py", "path.function")``."""
    recommended: tuple[str, ...] = ()
    """Topics on which messages of the host recommend the plugin."""

    @property
    def module(self) -> str:
        return self.value.partition(":")[0].strip()

    @property
    def attribute(self) -> str:
        return self.value.partition(":")[2].partition("[")[0].strip()

    @property
    def source(self) -> str:
        """``distribution version``."""
        return f"{self.distribution} {self.version}"

    def goes_by(self, spec: str) -> bool:
        """Returns True if ``spec``, a ``name`` or ``distribution:name``, could mean this plugin."""
        distribution, _, name = spec.rpartition(":")
        return name == self.name and (not distribution or normalised(distribution) == normalised(self.distribution))

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} from {self.source}"


def discover(disabled: bool = False) -> list[PluginInfo]:
    """Returns every installed plugin, sorted by kind (in the order of ``GROUPS``), name and distribution.

    Metadata is read once per process, and again where a directory of ``sys.path`` has changed, at which a command looks once. A
    distribution whose metadata cannot be read is left out: it must not take the command line down.

    Args:
        disabled: have those too that ``RLHF_DISABLE_PLUGINS`` leaves out, with that status.
    """
    found, off = _found(GROUPS)
    plugins = list(_with_conflicts(found))
    if disabled:
        plugins += [replace(info, status="disabled", problem=f"left out by --disable or {DISABLE}") for info in off]
    kinds = list(GROUPS)
    return sorted(plugins, key=lambda info: (kinds.index(info.kind), info.name, info.distribution))


def unchosen(kind: Unchosen) -> list[PluginInfo]:
    """Returns what is installed of a kind in ``UNCHOSEN``, sorted by name and distribution."""
    return sorted(_found((kind,))[0], key=lambda info: (info.name, info.distribution))


def _found(kinds: Collection[str]) -> tuple[list[PluginInfo], list[PluginInfo]]:
    """Returns what is installed of these kinds, and what of them ``RLHF_DISABLE_PLUGINS`` leaves out."""
    plugins = [info for info in _scan(tuple(sys.path), tuple(map(_changed_ns, sys.path))) if info.kind in kinds]
    out = [spec.strip() for spec in os.environ.get(DISABLE, "").split(",")]
    off = [info for info in plugins if any(info.goes_by(spec) for spec in out)]
    return [info for info in plugins if info not in off], off


@cache
def _scan(path: Sequence[str], changed_ns: Sequence[int]) -> list[PluginInfo]:
    found: dict[str, list[PluginInfo]] = {}
    for distribution in distributions():
        with suppress(Exception):
            if infos := list(_plugins_of(distribution)):  # type: ignore[arg-type]
                # The first on sys.path shadows later copies of the same distribution, as it does for imports.
                found.setdefault(normalised(infos[0].distribution), infos)
    return [info for infos in found.values() for info in infos]


@once
def headers(distribution: Distribution) -> Message:
    """The fields of a distribution's metadata, without the description that follows them."""
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    return HeaderParser().parsestr(text.partition("\n\n")[0])


@once
def _changed_ns(directory: str) -> int:
    try:
        return os.stat(directory or ".").st_mtime_ns
    except OSError:
        return 0


def normalised(distribution: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def locate(module: str) -> ModuleSpec | None:
    """The spec of a dotted module, or of a file, found without importing it or its parents; ``None`` where there is none.

    Asks every finder, those of editable installs included.
    """
    if module.endswith(".py"):
        return spec_from_file_location(Path(module).stem, module) if Path(module).is_file() else None
    path: list[str] | None = None
    name, spec = "", None
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = _find(name, path)
        if spec is None or (name != module and spec.submodule_search_locations is None):
            return None
        path = list(spec.submodule_search_locations or ())
    return spec


def preset_file(info: PluginInfo) -> Path | None:
    """The YAML file of a preset, found without importing its package; ``None`` where it is not there."""
    spec = locate(info.module)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (file := Path(folder, info.attribute)).is_file():
            return file
    return None


def _find(name: str, path: list[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        try:
            if hasattr(finder, "find_spec") and (spec := finder.find_spec(name, path)):
                return spec
        except KeyError:  # a folder without __init__ inside a package: its spec wants the parent in sys.modules
            spec = ModuleSpec(name, None, is_package=True)
            folders = (Path(parent, name.rpartition(".")[2]) for parent in path or ())
            spec.submodule_search_locations = [str(folder) for folder in folders if folder.is_dir()]
            return spec
    return None


def _plugins_of(distribution: Distribution) -> Iterator[PluginInfo]:
    if "[rlhf." not in (distribution.read_text("entry_points.txt") or ""):
        return
    metadata = headers(distribution)
    name, version = metadata.get("Name", "unknown"), metadata.get("Version", "unknown")
    api, unfit = _api(name, version, metadata)
    kinds = {group: kind for kind, group in {**GROUPS, **UNCHOSEN}.items()}
    points = list(distribution.entry_points)
    for point in points:
        if point.group in kinds:
            summary = " ".join(metadata.get("Summary", "").split())
            info = PluginInfo(kinds[point.group], point.name, name, version, api, "ok", summary, point.value)
            info = replace(
                info,
                spellings=tuple(_said(points, f"{point.group}.spellings", point.name)),
                recommended=tuple(topic for topic, _ in _said(points, f"{point.group}.recommended", point.name)),
            )
            if unfit:
                yield replace(info, status="incompatible", problem=unfit)
            elif info.kind == "python" and (info.name in sys.modules["rlhf_host"].__all__ or locate(f"rlhf_host.{info.name}")):
                yield replace(info, status="conflict", problem="rlhf_host has this name itself, and keeps it")
            elif absent := _absent(info):
                yield replace(info, status="missing", problem=absent)
            else:
                yield info


def _said(points: Iterable[EntryPoint], group: str, plugin: str) -> Iterator[tuple[str, str]]:
    """Yields what the distribution's entry points of a group say of the plugin: names, and what follows its own, behind a colon."""
    for point in points:
        name, _, rest = point.value.partition(":")
        if point.group == group and name.strip() == plugin:
            yield point.name, rest.strip()


def _api(name: str, version: str, metadata: Message) -> tuple[str, str]:
    """The stated range of host versions, and why this host is outside it, or an empty string."""
    if normalised(name) == HOST:
        return f"=={version}", ""
    lines = [line for line in metadata.get_all("Requires-Dist", []) if _about_host(line)]
    if not lines:
        return "unstated", ""
    # packaging is slow to import: only where there is a range to judge.
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(line) for line in lines]
        holding = [item for item in requirements if item.marker is None or item.marker.evaluate({"extra": ""})]
        ranges = [bound for item in holding for bound in item.specifier]
    except ValueError:
        return "unreadable", f"its requirement on {HOST} cannot be read: {'; '.join(lines)}"
    if not ranges:
        return "any" if holding else "unstated", ""
    # Build tools write <2,>=1; people read >=1,<2.
    stated = ",".join(sorted(sorted(map(str, ranges)), key=lambda bound: bound.startswith("<")))
    fits = all(bound.contains(__version__, prereleases=True) for bound in ranges)
    if fits:
        return stated, ""
    return stated, f"{name} {version} is for {HOST} {stated}, and this is {HOST} {__version__}"


def _about_host(line: str) -> bool:
    name = re.match(r"[\w.-]+", line)
    return name is not None and normalised(name[0]) == HOST


def _absent(info: PluginInfo) -> str:
    """Returns what the entry point names and is not there, or an empty string."""
    if not info.module or not info.attribute:
        return f"its entry point {info.value!r} is not of the form module:attribute"
    try:
        spec = locate(info.module)
    except Exception as error:
        return f"looking for module {info.module} failed: {type(error).__name__}: {error}"
    if spec is None:
        return f"module {info.module} is not there; reinstall {info.distribution}"
    if info.kind == "preset" and preset_file(info) is None:
        return f"package {info.module} has no file {info.attribute}; reinstall {info.distribution}"
    return ""


def _with_conflicts(plugins: Sequence[PluginInfo]) -> Iterator[PluginInfo]:
    claims: dict[tuple[str, str], list[PluginInfo]] = defaultdict(list)
    for info in plugins:
        claims[info.kind, info.name].append(info)
    for rivals in claims.values():
        names = sorted({info.distribution for info in rivals})
        if len(names) == 1:
            yield rivals[0]
            continue
        choices = " or ".join(f"{name}:{rivals[0].name}" for name in names)
        problem = f"{' and '.join(names)} both provide it; choose with {choices}"
        for info in rivals:
            yield replace(info, status="conflict", problem=problem) if info.status == "ok" else info
