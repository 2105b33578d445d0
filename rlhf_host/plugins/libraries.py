"""Traits of a plugin, and the libraries that they name: are they here, and what brings them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from rlhf_host.errors import PluginError, UserError, a, in_one_line
from rlhf_host.plugins.discovery import HOST, PluginInfo, normalised
from rlhf_host.plugins.python_objects import has_hooks
from rlhf_host.plugins.requirements import installed_as
from rlhf_host.protocols import BackendTraits, EngineTraits, RuntimeTraits, Traits, WeightSyncTraits

TRAITS: dict[str, type[Traits]] = {
    "engine": EngineTraits,
    "backend": BackendTraits,
    "runtime": RuntimeTraits,
    "weight_sync": WeightSyncTraits,
}
"""Kind → type of its plugins' traits; of others any."""


def traits_of(info: PluginInfo, plugin: Any) -> Any:
    """Returns the traits of a plugin with a protocol. Raises ``PluginError`` where it has none, or where it has hooks, which nobody
    would call.
    """
    try:
        traits = plugin.traits
    except AttributeError as error:
        raise PluginError(f"{info} has no traits: see rlhf_host.protocols ({error})") from error
    except Exception as error:
        raise PluginError(f"{info}: reading its traits failed: {in_one_line(error)}") from error
    if not isinstance(traits, TRAITS.get(info.kind, Traits)):
        wanted = TRAITS.get(info.kind, Traits).__name__
        raise PluginError(f"{info} has traits of type {type(traits).__name__}, not {wanted}: see rlhf_host.protocols")
    if has_hooks(plugin):
        raise PluginError(
            f"{info} marks methods with @hookimpl, and {a(info.kind)} has a protocol, no hooks: take the marks away"
        )
    return traits


def require_libraries(info: PluginInfo, plugin: Any) -> None:
    """Raises ``PluginError`` with what to install where a library of ``plugin.traits`` is missing."""
    if (missing := missing_library(info, traits_of(info, plugin).libraries)) is not None:
        raise PluginError(f"{info.kind} {info.name!r} needs {missing[0]}: pip install {missing[1]}")


def missing_library(info: PluginInfo, libraries: Iterable[str]) -> tuple[str, str] | None:
    """The first of a plugin's libraries that is not installed, and what to install for it."""
    library = next((library for library in libraries if not _is_there(library)), None)
    return None if library is None else (library, _what_brings(library, info.distribution))


def require_library(library: str, what: str) -> None:
    """Raises ``UserError`` where a library of one of the host's extras, which has its name, is not installed.

    Args:
        what: needs it, in the plural.
    """
    if not _is_there(library):
        raise UserError(f"{what} need {library}: pip install '{HOST}[{library}]'")


def _is_there(library: str) -> bool:
    # A module without a spec, as tests put in place of one; or without its package.
    with suppress(ValueError, ModuleNotFoundError):
        return importlib.util.find_spec(library) is not None
    return False


@cache
def _what_brings(library: str, distribution: str) -> str:
    """The distribution with the extra that requires the library; without such an extra the library itself."""
    own = installed_as(distribution)
    for line in (own.requires or ()) if own else ():
        with suppress(InvalidRequirement):
            requirement, marker = Requirement(line), line.partition("extra ==")[2]
            if marker and normalised(requirement.name) == normalised(library):
                extra = marker.split()[0].strip("\"'() ")
                return f"'{distribution}[{extra}]'"
    return normalised(library)
