"""Looking inside a plugin: importing it in a subprocess with a deadline, so that nothing it does can reach the caller."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhf_host.errors import PluginError
from rlhf_host.plugins.discovery import PROTOCOLS, PluginInfo, preset_file

DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class Inspection:
    """What importing a plugin shows."""

    problem: str = ""
    """Why it cannot be used; empty when it can."""
    trace: str = ""
    """The traceback behind ``problem``, or what a crashed import wrote to stderr."""
    file: str = ""
    hooks: list[str] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)
    """Fields of ``options.Option``."""
    libraries: list[str] = field(default_factory=list)
    """Of the traits of an engine, backend, runtime or kernels with default options."""


def look_inside(info: PluginInfo, deadline_s: float = DEADLINE_S) -> Inspection:
    """Import the plugin in a subprocess of at most ``deadline_s`` seconds: its hooks, options and file, or what is wrong."""
    if info.status in ("incompatible", "missing", "disabled"):
        return Inspection(problem=info.problem)
    with tempfile.TemporaryDirectory(prefix="rlhf-verify-") as folder:
        answer, errors = Path(folder, "answer.json"), Path(folder, "stderr")
        # -P: no working directory on sys.path, as for the rlhf command; PYTHONPATH: everything that was on ours.
        command = [sys.executable, "-P", "-m", __name__, json.dumps(dataclasses.asdict(info)), str(answer)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with errors.open("wb") as stderr:
            child = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
            try:
                code = child.wait(deadline_s)
            except subprocess.TimeoutExpired:
                return Inspection(problem=f"importing {info.module} took longer than {deadline_s:g} s")
            finally:
                end_process(child)
        if answer.exists():
            return Inspection(**json.loads(answer.read_text(encoding="utf-8")))
        return Inspection(
            problem=f"importing {info.module} ended the process with exit code {code}",
            trace=errors.read_text(encoding="utf-8", errors="replace"),
        )


def verify(plugins: Sequence[PluginInfo], deadline_s: float = DEADLINE_S) -> list[PluginInfo]:
    """The same plugins, those that cannot be imported or implement unknown hooks now ``broken``."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        found = list(pool.map(lambda info: look_inside(info, deadline_s), plugins))
    return [
        replace(info, status="broken", problem=inside.problem) if inside.problem and info.status in ("ok", "conflict") else info
        for info, inside in zip(plugins, found, strict=True)
    ]


def end_process(child: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the child, its own children included."""
    if child.poll() is None:
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
        child.wait()


def _inspect(info: PluginInfo) -> Inspection:
    """In the child."""
    if info.kind == "preset":
        return _inspect_preset(info)
    from rlhf_host.plugins.libraries import traits_of
    from rlhf_host.plugins.manager import Loaded, PluginManager
    from rlhf_host.plugins.options import describe_options, options_model
    from rlhf_host.plugins.selection import build, load

    cls = load(info)
    file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
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


def _child(description: str, answer: str) -> None:
    info = PluginInfo(**json.loads(description))
    try:
        inspection = _inspect(info)
    except PluginError as error:
        trace = "".join(traceback.format_exception(error.__cause__)) if error.__cause__ else ""
        inspection = Inspection(problem=str(error).removeprefix(f"{info}: "), trace=trace)
    Path(answer).write_text(json.dumps(dataclasses.asdict(inspection)), encoding="utf-8")
    os._exit(0)  # threads that an import left behind must not hold the answer back


if __name__ == "__main__":
    _child(*sys.argv[1:])
