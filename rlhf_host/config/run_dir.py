"""Run directories: where a new run goes, its ``config.yaml``, and whether an old directory is a run's."""

from __future__ import annotations

import itertools
import os
import re
from datetime import datetime
from pathlib import Path

from rlhf_host.config.schema import RunConfig, defaults
from rlhf_host.config.tree import NONE
from rlhf_host.config.yaml_file import write_yaml
from rlhf_host.directories import flush
from rlhf_host.errors import UserError, near_matches
from rlhf_host.plugins.selection import parse_choice

CONFIG = "config.yaml"
BEST = "checkpoints/best"
"""A link to the checkpoint with the best ``checkpoint.best``."""


def with_run_dir(config: RunConfig, now: datetime | None = None) -> RunConfig:
    """The configuration with ``name`` (default: ``<algorithm>-<first reward>``) and ``run_dir`` decided. Nothing is written.

    Raises:
        UserError: the directory has something in it already.
    """
    parts = (parse_choice(config.algo.name)[0] if config.algo else "", next(iter(config.reward), ""))
    name = config.name or "-".join(filter(None, parts)) or "run"
    if config.run_dir is None:
        stem = f"{(now or datetime.now()):%Y%m%d-%H%M%S}-{re.sub(r'[^A-Za-z0-9_.+-]+', '-', name)}"
        numbered = (Path("runs") / (f"{stem}-{number}" if number > 1 else stem) for number in itertools.count(1))
        path = next(path for path in numbered if not path.exists())
    else:
        path = Path(config.run_dir)
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is a file: --run-dir names a directory")
        if path.is_dir() and any(path.iterdir()):
            raise UserError(f"{path} is not empty: continue with --resume {path}, or choose another --run-dir")
    return config.model_copy(update={"name": name, "run_dir": str(path)})


def require_run(path: Path) -> Path:
    """The run's ``config.yaml``. Raises ``UserError`` when ``path`` is no run directory."""
    if not path.is_dir():
        siblings = [str(path.parent / entry.name) for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"{path}: no such run directory{near_matches(str(path), siblings)}")
    if not (path / CONFIG).is_file():
        raise UserError(f"{path} has no {CONFIG}: a run directory is what rlhf train writes, such as runs/<time>-<name>")
    return path / CONFIG


def config_yaml(config: RunConfig) -> str:
    """The whole configuration as YAML that loads back to the same configuration."""
    values = config.model_dump()
    # The default trackers come back unless the file says that they are gone.
    values["tracker"] |= {alias: {"name": NONE} for alias in defaults()["tracker"] if alias not in config.tracker}
    return write_yaml(values)


def save_config(config: RunConfig, path: str | Path) -> None:
    """Write ``config_yaml(config)``: aside, synced, then renamed."""
    path = Path(path)
    aside = path.with_name(f".{path.name}.partial")
    try:
        aside.write_text(config_yaml(config), encoding="utf-8")
        flush(aside)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
