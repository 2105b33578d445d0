"""Files and directories that appear and disappear whole, whenever the process is killed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from rlhf_host.errors import DivergedError, LostError, RunError


def cache_directory() -> Path:
    """What can be made again: ``$RLHF_CACHE``, or ``~/.cache/rlhf-host``."""
    return Path(os.environ.get("RLHF_CACHE") or Path.home() / ".cache" / "rlhf-host").expanduser()


def write_file(path: Path, content: bytes) -> None:
    """Write aside, sync, rename: readers see the old file or the new one. An ``OSError`` names ``path``."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        aside.write_bytes(content)
        flush(aside)
        aside.replace(path)
    except OSError as error:
        error.filename = str(path)  # writing to a full disk names no file
        raise
    finally:
        aside.unlink(missing_ok=True)


def write_directory(path: Path, fill: Callable[[Path], None]) -> None:
    """Make ``path`` by filling a hidden sibling, syncing it to disk and renaming; an older ``path`` is replaced last.

    Raises ``RunError`` when it cannot be written, as on a full disk, whoever notices.
    """
    from safetensors import SafetensorError

    aside, old = (path.with_name(f".{path.name}.{what}") for what in ("partial", "old"))
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        fill(aside)
        for directory, _, files in os.walk(aside):
            for name in files:
                flush(Path(directory) / name)
            flush(Path(directory))
    except BaseException as error:
        free = shutil.disk_usage(path.parent).free / 1e9
        shutil.rmtree(aside, ignore_errors=True)
        # Torch's own writer raises RuntimeError, a tokenizer's a bare Exception, and a plugin's failure is a RunError already.
        failed = isinstance(error, OSError | RuntimeError | SafetensorError | RunError) or type(error) is Exception
        if failed and not isinstance(error, LostError | DivergedError):
            reason = str(error).partition("\n")[0]
            raise RunError(f"{path} cannot be written: {reason}; its disk has {free:.3g} GB free") from error
        raise
    if path.exists() or path.is_symlink():
        _remove(old)
        path.rename(old)
    aside.rename(path)
    flush(path.parent)
    _remove(old)


def remove_directory(path: Path) -> None:
    """Rename first, so that a killed removal never leaves half a directory under its name."""
    if path.exists() or path.is_symlink():
        removed = path.with_name(f".{path.name}.removed")
        _remove(removed)
        path.rename(removed)
        _remove(removed)


def _remove(path: Path) -> None:
    """Of a link, the link alone."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def flush(path: Path) -> None:
    """Wait until a file, or a directory's entries, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
