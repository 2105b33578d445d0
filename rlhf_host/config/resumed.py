"""Changes between a run and its resume: what is refused, and what is said."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_host.config.load import load_config
from rlhf_host.config.problems import fail
from rlhf_host.config.resolve import chosen, found_under
from rlhf_host.config.run_dir import CONFIG, PLUGINS, STATE, checkpoint_dirs
from rlhf_host.config.schema import RunConfig
from rlhf_host.errors import PluginError
from rlhf_host.plugins.catalogue import install_line
from rlhf_host.plugins.discovery import discover

_ANOTHER_RUN = re.compile(
    r"seed|data\.shuffle|algo\.name|roles\.[^.]+\.(model|revision|adapter|quantize|lora\..+|freeze|train_only)"
)
"""Settings that checkpoints follow from."""


def require_plugins(run_dir: Path, config: RunConfig, kinds: Collection[str] = ()) -> None:
    """Raises ``PluginError`` when plugins that ``config`` still chooses were uninstalled since the run's last start, or their files
    removed.

    Args:
        kinds: of plugins that are used; default: all.
    """
    installed = {(info.kind, info.name) for info in discover()}
    names, paths = set(), set()
    for kind, alias, choice, _ in chosen(config):
        names.add((found_under(kind), choice.name.rpartition(":")[2]))
        paths |= {(found_under(kind), alias, value) for value in choice.options.values() if isinstance(value, str)}
    path, lines = run_dir / PLUGINS, []
    for entry in json.loads(path.read_text()) if path.exists() else []:
        kind, name, home, version = (entry[key] for key in ("kind", "name", "distribution", "version"))
        if kinds and kind not in kinds:
            continue
        lost = f"{kind} {name!r} of this run was in {home} {version}, which is not"
        if home and home.endswith(".py"):  # a file that is not there is taken for one with a function (plugins.spellings)
            if not Path(home).is_file() and (kind, entry["alias"], home) in paths:
                lines.append(f"{lost} there any more: put it back, or choose another {kind}")
        elif home and (kind, name) in names - installed:
            lines.append(f"{lost} installed any more: {install_line(f'{home}=={version}')}")
    fail(lines, PluginError)


def check_resume(run_dir: Path, config: RunConfig, *, force: bool = False) -> list[str]:
    """Compare the settings with those of the run so far; gives warnings about what changed.

    Args:
        force: let all settings change.

    Raises:
        UserError: one line per setting that would make it another run.
    """
    file = load_config(run_dir / CONFIG).model_dump(mode="json")
    so_far = _recorded(run_dir) or file
    in_file = {name for name, _, _ in _differences(so_far, file)}
    changes = list(_differences(so_far, config.model_dump(mode="json")))
    if not force:
        fail(
            f"{name} is {then} in {run_dir}, and cannot become {now}{f', as {CONFIG} has it' if name in in_file else ''}: start"
            " a new run, or add --force"
            for name, then, now in changes
            if _ANOTHER_RUN.fullmatch(name)
        )
    listed = ", ".join(f"{name} {then} → {now}{f' ({CONFIG})' if name in in_file else ''}" for name, then, now in changes)
    return [f"not as in the run so far: {listed}"] if changes else []


def _recorded(run_dir: Path) -> dict[str, Any] | None:
    """The configuration that the newest checkpoint was written with: ``config.yaml`` may have been edited since.

    ``None`` where no checkpoint says it.
    """
    for _, path in reversed(checkpoint_dirs(run_dir)):
        with suppress(OSError, ValueError, LookupError, TypeError):  # damaged, or of another version
            recorded = json.loads((path / STATE).read_text("utf-8"))["config"]
            return RunConfig.model_validate(recorded).model_dump(mode="json")
    return None


def _differences(then: Any, now: Any, name: str = "") -> Iterator[tuple[str, str, str]]:
    if isinstance(then, dict) and isinstance(now, dict):
        for key in {**then, **now}:
            if name or key not in ("name", "run_dir", "max_restarts"):
                yield from _differences(then.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif then != now:
        yield name, _shown(then), _shown(now)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("name", "set"))
    return "not set" if value is None else str(value)
