"""Run directories: where a new run goes, who is writing there, its ``config.yaml`` and checkpoints, and whether an old directory
is a run's."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from rlhf_host.config.schema import RunConfig, defaults
from rlhf_host.config.tree import NONE
from rlhf_host.config.yaml_file import write_yaml
from rlhf_host.errors import UserError, near_matches
from rlhf_host.plugins.selection import parse_choice

CONFIG = "config.yaml"
BEST, LAST = "checkpoints/best", "checkpoints/last"
"""Links to the checkpoint with the best ``checkpoint.best``, and to the newest."""
STATE = "state.json"
"""File of a checkpoint with what is no tensor, and with the configuration."""
PLUGINS = "plugins.json"
RUN = "run.json"
RUNS = Path("runs")
"""Directory of runs, unless --run-dir names another."""
LOCK, HOLDER = ".lock", ".lock-holder"
_STEP = re.compile(r"step-(\d{6,})")
_MADE: set[Path] = set()
"""By this process."""


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the directory, made where it is missing, against other processes; the system lets go of it for one that dies.

    When nothing else was written, what was made of it goes again. Raises ``UserError`` at once when another process holds it, or
    when there can be no directory.
    """
    from filelock import FileLock, Timeout

    _made(run_dir)
    _refuse_other_files(run_dir)
    holder, lock = run_dir / HOLDER, FileLock(run_dir / LOCK)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        other = holder.read_text() if holder.exists() else "another process"
        raise UserError(f"{run_dir} is in use by {other}: wait for it or stop it, or use another --run-dir") from None
    try:
        holder.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        with suppress(OSError):  # another error may be under way
            if not written(run_dir):
                for name in (HOLDER, LOCK):
                    (run_dir / name).unlink(missing_ok=True)
                if run_dir in _MADE:
                    run_dir.rmdir()
        lock.release()


def in_use(run_dir: Path) -> bool:
    """Returns True if a process holds the directory."""
    import fcntl

    with suppress(FileNotFoundError), (run_dir / LOCK).open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def about_run(run_dir: Path) -> dict[str, Any]:
    """Returns what ``run.json`` says; nothing where there is none that can be read."""
    try:
        about: Any = json.loads((run_dir / RUN).read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    known: dict[str, Any] = about if isinstance(about, dict) else {}
    return {name: value for name, value in known.items() if name not in ("started", "ended") or isinstance(value, int | float)}


def checkpoint_dirs(run_dir: Path) -> list[tuple[int, Path]]:
    """``(step, path)`` of the whole checkpoints of a run, oldest first."""
    root = run_dir / "checkpoints"
    return sorted((int(match[1]), path) for path in root.glob("step-*") if (match := _STEP.fullmatch(path.name)))


def written(run_dir: Path) -> bool:
    """Returns True if the directory has anything but its lock."""
    return any(path.name not in (LOCK, HOLDER) for path in run_dir.iterdir())


def with_run_dir(config: RunConfig, now: datetime | None = None, *, make: bool = False) -> RunConfig:
    """The configuration with ``name`` (default: ``<algorithm>-<first reward>``) and ``run_dir`` decided.

    Args:
        now: the default directory is named for this time.
        make: make the default directory, so that of runs that start together each has its own.

    Raises:
        UserError: the directory has something in it already.
    """
    parts = (parse_choice(config.algo.name)[0] if config.algo else "", next(iter(config.reward), ""))
    name = config.name or "-".join(filter(None, parts)) or "run"
    if config.run_dir is None:
        stem = f"{(now or datetime.now()):%Y%m%d-%H%M%S}-{re.sub(r'[^A-Za-z0-9_.+-]+', '-', name)}"
        numbered = (RUNS / (f"{stem}-{number}" if number > 1 else stem) for number in itertools.count(1))
        path = next(path for path in numbered if (_made(path) if make else not path.exists()))
    else:
        path = Path(config.run_dir)
        _refuse_other_files(path)
        if path.is_dir() and written(path):
            raise UserError(
                f"{path} is not empty: continue with --resume {shlex.quote(str(path))}, or choose another --run-dir"
            )
    return config.model_copy(update={"name": name, "run_dir": str(path)})


def _made(path: Path) -> bool:
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        return False
    _MADE.add(path)
    return True


def _refuse_other_files(path: Path) -> None:
    if not path.is_dir() and (path.exists() or path.is_symlink()):
        what = "a file" if path.exists() else f"a link to {os.readlink(path)}, which does not exist"
        raise UserError(f"{path} is {what}: --run-dir names a directory")


def named_run(path: Path) -> Path:
    """The run in ``runs/`` that a name means, or a place inside it; the path itself where it exists, or where there is no such run.
    ``rlhf runs`` shows these names."""
    path = path.expanduser()
    if path.is_absolute() or not path.parts or path.exists() or not (RUNS / path.parts[0] / CONFIG).is_file():
        return path
    return RUNS / path


def require_run(path: Path) -> Path:
    """The run's ``config.yaml``. Raises ``UserError`` when ``path`` is no run directory."""
    path = named_run(path)
    if not path.is_dir():
        if path.exists():
            raise UserError(f"{path} is a file: a run directory is what rlhf train writes, such as runs/<time>-<name>")
        near = near_matches(str(path), near_runs(path)) or " (a run that has just begun has none yet)"
        raise UserError(f"{path}: no such run directory{near}")
    if not (path / CONFIG).is_file():
        raise UserError(f"{path} has no {CONFIG}: a run directory is what rlhf train writes, such as runs/<time>-<name>")
    return path / CONFIG


def near_runs(path: Path) -> list[str]:
    """Returns what could be meant by a path that does not exist: runs beside it, and for a name alone those in ``runs/``."""
    named = _runs_in(RUNS) if len(path.parts) == 1 else []
    return [*(str(path.parent / each.name) for each in _runs_in(path.parent)), *(each.name for each in named)]


def _runs_in(folder: Path) -> list[Path]:
    return [each for each in folder.iterdir() if (each / CONFIG).is_file()] if folder.is_dir() else []


def config_yaml(config: RunConfig) -> str:
    """The whole configuration as YAML that loads back to the same configuration."""
    values = config.model_dump()
    # The default trackers come back unless the file says that they are gone.
    values["tracker"] |= {alias: {"name": NONE} for alias in defaults()["tracker"] if alias not in config.tracker}
    return write_yaml(values)
