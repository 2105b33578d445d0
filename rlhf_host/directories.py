"""Files and directories that appear and disappear whole, whenever the process is killed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from rlhf_host.errors import DivergedError, LostError, RunError, UserError
from rlhf_host.scratch import Scratch


def cache_directory() -> Path:
    """What can be made again: ``$RLHF_CACHE``, or ``~/.cache/rlhf-host``."""
    return Path(os.environ.get("RLHF_CACHE") or Path.home() / ".cache" / "rlhf-host").expanduser()


def fill_cache(path: Path, fill: Callable[[Path], None], is_whole: Callable[[], bool]) -> None:
    """Make the directory ``path`` of the cache, whole or not at all, whoever else does the same.

    Args:
        fill: writes the files.
        is_whole: whether ``path``, where it is there already, can be used; it is replaced otherwise.

    Raises:
        UserError: when it cannot be written.
    """
    root = path.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        with Scratch(f".{path.name}-", root) as aside:
            fill(aside)
            for part in (*aside.iterdir(), aside):
                flush(part)
            try:
                aside.rename(path)
            except OSError:
                if not is_whole():  # damaged; otherwise another process was first
                    remove_directory(path)
                    aside.rename(path)
    except OSError as error:
        reason = f"{root} cannot be written: {error.strerror}"
        raise UserError(f"{reason}; set RLHF_CACHE to a directory that can be written and has space for it") from error


def content_hash(files: Iterable[Path]) -> str:
    """sha256 over the names of these files and the hashes of their content, in order of their paths. Each is read once in a process
    while its size and date stay the same."""
    facts = [(file, (known := file.stat()).st_size, known.st_mtime_ns) for file in sorted(files)]
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(lambda fact: _file_hash(*fact), facts))
    names = [file.name for file, *_ in facts]
    return hashlib.sha256(json.dumps([names, digests]).encode()).hexdigest()


@lru_cache(maxsize=1024)
def _file_hash(path: Path, size: int, modified: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
