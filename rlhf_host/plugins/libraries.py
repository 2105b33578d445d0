"""Libraries that a plugin's traits name: are they here, and what brings them."""

from __future__ import annotations

import importlib.util
from typing import Any

from importlib_metadata import PackageNotFoundError, requires
from packaging.requirements import InvalidRequirement, Requirement

from rlhf_host.errors import PluginError
from rlhf_host.plugins.discovery import PluginInfo, normalised


def require_libraries(info: PluginInfo, plugin: Any) -> None:
    """Raises ``PluginError`` with what to install where a library of ``plugin.traits`` is missing."""
    for library in plugin.traits.libraries:
        if not _is_there(library):
            raise PluginError(
                f"{info.kind} {info.name!r} needs {library}: pip install {_what_brings(library, info.distribution)}"
            )


def _is_there(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ValueError:  # a module without a spec, as tests put in place of one
        return False


def _what_brings(library: str, distribution: str) -> str:
    """The distribution with the extra that requires the library; without such an extra the library itself."""
    try:
        lines = requires(distribution) or []
    except PackageNotFoundError:
        lines = []
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        marker = str(requirement.marker or "")
        if normalised(requirement.name) == normalised(library) and "extra ==" in marker:
            extra = marker.split("extra ==")[1].split()[0].strip("\"'() ")
            return f"'{distribution}[{extra}]'"
    return normalised(library)
