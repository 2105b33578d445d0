"""The plugins under ``rlhf doctor``: what is broken, and what each runtime, engine and backend lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rlhf_host.cli.findings import Finding
from rlhf_host.config.defaults import library
from rlhf_host.plugins.discovery import HOST, PROTOCOLS, PluginInfo, discover
from rlhf_host.plugins.verify import verify

PLUGINS, PARTS = "Plugins", "What can run"


def plugins(deadline_s: float) -> Iterator[Finding]:
    """Every plugin imported in a process of its own; engines, backends and runtimes are judged by their libraries."""
    known = [info for info in discover(disabled=True) if info.kind not in PROTOCOLS]
    found = verify(known, deadline_s)
    fine = [info for info in found if info.status == "ok"]
    distributions = {info.distribution for info in fine}
    yield Finding(PLUGINS, "plugins", "ok", f"{len(fine)} of {len(distributions)} distributions load")
    yield from (_bad(info) for info in found if info.status != "ok")


def _bad(info: PluginInfo) -> Finding:
    name = f"{info.kind} {info.name}"
    if info.status == "disabled":
        return Finding(PLUGINS, name, "note", info.problem)
    if info.status == "conflict":
        return Finding(PLUGINS, name, "warning", info.problem, f"or uninstall one: rlhf plugins uninstall {info.distribution}")
    advice = {
        "incompatible": f"pip install --upgrade {info.distribution}",
        "missing": f"pip install --force-reinstall --no-deps {info.distribution}",
    }.get(info.status, f"rlhf plugins show {info.name} shows where; rlhf plugins uninstall {info.name} takes it away")
    return Finding(PLUGINS, name, "problem", f"{info.status}: {info.problem}", advice)


def parts(libraries: Mapping[str, Sequence[Finding]]) -> Iterator[Finding]:
    """Which runtimes, engines and backends can be chosen here, by what their libraries' imports showed."""
    for info in discover():
        if info.kind not in PROTOCOLS:
            continue
        name = f"--{info.kind} {info.name}"
        needed = library(info)
        states = {finding.name: finding.status for finding in libraries.get(needed, ())}
        if info.status not in ("ok", "conflict"):
            yield Finding(PARTS, name, "problem", info.problem, f"rlhf plugins show {info.name}")
        elif states.get(needed) == "absent":
            yield Finding(PARTS, name, "absent", f"needs {needed}", f"pip install '{HOST}[{needed}]'")
        elif states.get(needed) == "problem":
            yield Finding(PARTS, name, "problem" if needed == "torch" else "warning", f"{needed} does not work, see Libraries")
        else:
            yield Finding(PARTS, name, "ok", info.source)
