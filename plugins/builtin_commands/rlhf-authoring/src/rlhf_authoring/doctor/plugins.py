"""The plugins under ``rlhf doctor``: what is broken, and what each runtime, engine and backend lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlhf_authoring.doctor.findings import Finding, usable_cores
from rlhf_authoring.inspection import look_inside, verify
from rlhf_host.installed import PROTOCOLS, PluginInfo, discover, install_line, missing_library
from rlhf_host.settings import SINGLE

PLUGINS, PARTS = "Plugins", "What can run"


def plugins(deadline_s: float) -> Iterator[Finding]:
    """Every plugin imported in a process of its own; engines, backends and runtimes are judged by their libraries."""
    known = [info for info in discover(disabled=True) if info.kind not in PROTOCOLS]
    verified = verify(known, deadline_s)
    fine = [info for info in verified if info.status == "ok"]
    distributions = {info.distribution for info in fine}
    yield Finding(PLUGINS, "plugins", "ok", f"{len(fine)} of {len(distributions)} distributions load")
    yield from (_bad(info) for info in verified if info.status != "ok")


def _bad(info: PluginInfo) -> Finding:
    name = f"{info.kind} {info.name}"
    if info.status == "disabled":
        return Finding(PLUGINS, name, "note", info.problem)
    if info.status == "conflict":
        return Finding(PLUGINS, name, "warning", info.problem, f"or uninstall one: rlhf plugins uninstall {info.distribution}")
    advice = {
        "incompatible": install_line("--upgrade", info.distribution),
        "missing": install_line("--force-reinstall", "--no-deps", info.distribution),
    }.get(info.status, f"rlhf plugins show {info.name} shows where; rlhf plugins uninstall {info.name} removes it")
    return Finding(PLUGINS, name, "problem", f"{info.status}: {info.problem}", advice)


def parts(libraries: Mapping[str, Sequence[Finding]], deadline_s: float) -> Iterator[Finding]:
    """Tells which engines, backends, runtimes, kernels and weight syncs can be chosen here, by their libraries."""
    broken = {name for name, findings in libraries.items() if any((f.name, f.status) == (name, "problem") for f in findings)}
    known, keys = [info for info in discover() if info.kind in PROTOCOLS], {kind: key for key, kind in SINGLE.items()}
    with ThreadPoolExecutor(usable_cores()) as pool:
        for info, inside in zip(known, pool.map(lambda info: look_inside(info, deadline_s), known), strict=True):
            name = f"--{keys[info.kind]} {info.name}"
            unusable = [library for library in (*inside.libraries, "torch") if library in broken]
            if inside.problem:
                yield Finding(PARTS, name, "problem", inside.problem, f"rlhf plugins show {info.name}")
            elif (missing := missing_library(info, inside.libraries)) is not None:
                yield Finding(PARTS, name, "absent", f"needs {missing[0]}", f"pip install {missing[1]}")
            elif unusable:
                status: Any = "problem" if unusable == ["torch"] else "warning"
                yield Finding(PARTS, name, status, f"{unusable[0]} does not work, see Libraries")
            else:
                yield Finding(PARTS, name, "ok", info.source)
