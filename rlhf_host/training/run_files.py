"""Files that a run writes at its start: its configuration, its plugins, and the packages to install for running it again."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_host import __version__
from rlhf_host.config.defaults import KINDS, kernels_to_try, plugin_spec
from rlhf_host.config.run_dir import CONFIG, HOLDER, LOCK, PLUGINS, RUN, about_run, config_yaml
from rlhf_host.config.schema import RunConfig
from rlhf_host.directories import remove, write_file
from rlhf_host.plugins import requirements
from rlhf_host.plugins.manager import Loaded, PluginManager
from rlhf_host.plugins.selection import PYTHON
from rlhf_host.plugins.specs import PluginSpec
from rlhf_host.records.needs import Outcome


def write_start(config: RunConfig, manager: PluginManager, run_dir: Path, step: int = 0) -> None:
    """Writes the files. A file that a resume replaces is kept beside it, as ``NAME.until-step-NNNNNN``.

    Args:
        step: step of the checkpoint that the run resumes from.
    """
    plugins = [_plugin_entry(item) for item in manager.loaded]
    plugins += [_plugin_entry(spec) for spec in (plugin_spec(config, "sync"), *kernels_to_try(config.kernels))]
    for left in run_dir.rglob(".*.partial"):  # of a writer that was killed
        remove(left)
    texts = {
        CONFIG: config_yaml(config),
        PLUGINS: json.dumps(plugins, indent=1) + "\n",
        requirements.FILE: _requirements(config, manager),
    }
    for name, text in texts.items():
        path, before = run_dir / name, run_dir / f"{name}.until-step-{step:06d}"
        if path.exists() and path.read_text("utf-8") != text and not before.exists():
            write_file(before, path.read_bytes())
        write_file(path, text.encode())


def note_begin(run_dir: Path, steps: int, step: int | None, rates: Mapping[str, float], more: Mapping[str, str]) -> None:
    """Writes into ``run.json`` that the run has begun, or goes on.

    Args:
        steps: number of planned steps.
        step: step of the checkpoint that the run resumes from.
        rates: peak learning rates of the trained roles, which plugins decide where the configuration does not.
        more: what the runtime says of itself, where it has an attribute ``about``.
    """
    known = about_run(run_dir) if step is not None else {}
    about = {"started": known.get("started", round(time.time(), 3)), "steps": steps, "status": "running"}
    about["resumed_after"] = [*known.get("resumed_after", []), *([] if step is None else [step])]
    machine = f"{platform.system()} {platform.machine()}"
    about |= {"rlhf_host": __version__, "python": platform.python_version(), "machine": machine}
    about["used"] = {"roles": {role: {"lr": rate} for role, rate in rates.items()}}
    _write_about(run_dir, {**more, **about})


def note_end(run_dir: Path, outcome: Outcome) -> None:
    """Writes into ``run.json`` how the run ended, unless it was refused."""
    if about := about_run(run_dir):
        about |= {"ended": round(time.time(), 3), "status": outcome.status, "step": outcome.step}
        about |= {"error": outcome.error} if outcome.error else {}
        _write_about(run_dir, about | ({"stopped_by": outcome.reason} if outcome.reason else {}))


def _write_about(run_dir: Path, about: dict[str, Any]) -> None:
    write_file(run_dir / RUN, json.dumps(about, indent=1).encode() + b"\n")


def remove_start(run_dir: Path, *, everything: bool) -> None:
    """Removes what a refused run has written: its directory is free for the next one.

    Args:
        everything: also what trackers wrote. Otherwise the first files are removed, and only where there are no others.
    """
    files = [run_dir / name for name in (CONFIG, PLUGINS, requirements.FILE, RUN)]
    present = [path for path in run_dir.iterdir() if path.name not in (LOCK, HOLDER)]
    if everything or not set(present) - set(files):
        for path in present:
            remove(path)


def _requirements(config: RunConfig, manager: PluginManager) -> str:
    """Returns the exact versions of the packages that the run uses."""
    plugins = [item.info for item in manager.loaded]
    plugins += [plugin_spec(config, key).info for key in (*KINDS, "sync")]
    plugins += [spec.info for spec in kernels_to_try(config.kernels)]
    used = {info.name for info in plugins} | sys.modules.keys()
    extras = [extra for extra in requirements.extras_of_host() if extra in used]
    return requirements.pinned([info.distribution for info in plugins], extras)


def _plugin_entry(item: Loaded | PluginSpec) -> dict[str, Any]:
    """Returns what is needed to reproduce the run: an installed plugin's distribution, or where a Python object was defined."""
    source: dict[str, Any] = {"distribution": item.info.distribution, "version": item.info.version}
    if item.info.distribution == PYTHON:
        source = {"distribution": None, "version": None, "object": item.info.value}
    return {"kind": item.kind, "alias": item.alias, "name": item.info.name, **source, "weight": item.weight}
