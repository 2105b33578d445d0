"""Files and directories that appear and disappear as a whole, even if the process is killed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from rlhf_host.errors import DivergedError, LostError, RunError, UserError
from rlhf_host.scratch import remove_tree

log = logging.getLogger(__name__)

NO_ROOM = [*map(os.strerror, (errno.ENOSPC, errno.EDQUOT)), "PytorchStreamWriter failed", "inline_container"]
"""Texts in errors of a full disk, also from other processes or languages. Torch's own errors do not tell more."""
TOO_LARGE = os.strerror(errno.EFBIG)
NO_RIGHTS = [*map(os.strerror, (errno.EROFS, errno.EACCES, errno.EPERM))]


def packaged(inside: str, in_clone: str) -> Path:
    """Returns a directory that a wheel has in the package under the name ``inside``, and a clone of the repository under
    another.
    """
    package = Path(__file__).parent
    path = package / inside
    return path if path.exists() else package.parent / in_clone


def cache_directory() -> Path:
    """Returns the directory for files that can be made again: ``$RLHF_CACHE``, or ``~/.cache/rlhf-host``."""
    return Path(os.environ.get("RLHF_CACHE") or Path.home() / ".cache" / "rlhf-host").expanduser()


def unwritable_cache(root: Path, error: OSError) -> UserError:
    """Returns the error for a directory of the cache that cannot be written."""
    reason = f"{root} cannot be written: {error.strerror}"
    return UserError(f"{reason}; set RLHF_CACHE to a directory that can be written and has space for it")


def content_hash(files: Iterable[Path]) -> str:
    """Returns the sha256 over the names of these files and the hashes of their content, in order of their paths. A file is read
    once per process as long as its size and date stay the same.
    """
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
    """Writes a temporary file, syncs and renames it: readers see the old file or the new one. If ``path`` is a link, its target
    is replaced. An ``OSError`` names ``path``. Raises ``UserError`` if ``path`` is something other than a file.
    """
    path = path.resolve() if path.is_symlink() else path
    if not path.name or (path.exists() and not path.is_file()):
        raise UserError(f"{path} is no file: give the name of one to write")
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


@contextlib.contextmanager
def new_directory(path: Path, *, like: Path | None = None, room: str = "make room there") -> Iterator[Path]:
    """Creates a hidden sibling of ``path`` to fill. At the end it is synced to disk and renamed; an older ``path`` is replaced
    last. After a failure it is removed.

    Args:
        like: a directory that needed about as much space, for messages.
        room: advice if there is no space.

    Raises:
        RunError: it cannot be written, as on a full disk, whichever code finds out.
    """
    from safetensors import SafetensorError

    aside, old = (path.with_name(f".{path.name}.{what}") for what in ("partial", "old"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_tree(aside)
        aside.mkdir()
        yield aside
        for directory, _, files in os.walk(aside):
            for name in files:
                flush(Path(directory) / name)
            flush(Path(directory))
    except BaseException as error:
        facts = _space(aside, like)
        remove_tree(aside)
        # Torch's own writer raises RuntimeError, a tokenizer's a bare Exception, and a plugin's failure is a RunError already.
        failed = isinstance(error, OSError | RuntimeError | SafetensorError | RunError) or type(error) is Exception
        if failed and not isinstance(error, LostError | DivergedError):
            reason = str(error).partition("\n")[0]
            if "inline_container" in reason and shutil.disk_usage(path.parent).free < 1e6:
                reason = os.strerror(errno.ENOSPC)
            raise RunError(f"{path} cannot be written: {reason}; {facts}{_remedy(str(error), room)}") from error
        raise
    if path.exists() or path.is_symlink():
        remove(old)
        path.rename(old)
    aside.rename(path)
    flush(path.parent)
    remove(old)


def _space(aside: Path, like: Path | None) -> str:
    """Returns the free space on a directory's disk, and what it needs if that is known to be more."""
    free = shutil.disk_usage(next(parent for parent in aside.parents if parent.exists())).free
    needed = max(directory_size(aside), 0 if like is None else directory_size(like))
    told = f"its disk has {amount(free)} free"
    return f"{told}, and it needs {amount(needed)} or more" if needed > free else f"{told}, and more was to be written"


def amount(count: float) -> str:
    """Returns a number of bytes for people."""
    return f"{count / 1e9:.3g} GB" if count >= 1e8 else f"{count / 1e6:.3g} MB"


def directory_size(directory: Path) -> int:
    """Returns the bytes of all files in it."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def _remedy(message: str, room: str) -> str:
    if any(text in message for text in NO_ROOM):
        return f": {room}"
    if TOO_LARGE in message:
        return ": this process or its disk has a limit for the size of files (ulimit -f)"
    return ": make the directory writable for this user" if any(text in message for text in NO_RIGHTS) else ""


class Lines:
    """Appends lines to a file. Lines that cannot be written, as on a full disk, are kept and written with the next ones; the
    file never contains a part of one.
    """

    def __init__(self, path: Path):
        self.path = path
        self._waiting = b""
        self._told = False

    def add(self, line: bytes) -> None:
        self._waiting += line
        try:
            self.flush()
            self._told = False
        except OSError as error:
            if not self._told:
                log.warning("%s cannot be written: %s; its lines are kept until there is room", self.path, error.strerror)
            self._told = True

    def flush(self) -> None:
        """Writes the lines. Raises ``OSError`` if they cannot be written."""
        if self._waiting:
            with self.path.open("ab", buffering=0) as file:
                size, left = os.fstat(file.fileno()).st_size, memoryview(self._waiting)
                try:
                    while left:
                        left = left[file.write(left) :]
                except OSError as error:
                    os.ftruncate(file.fileno(), size)
                    error.filename = str(self.path)
                    raise
            self._waiting = b""


def remove_directory(path: Path) -> None:
    """Renames and then removes a directory, so that a killed removal never leaves half of it under its name."""
    if path.exists() or path.is_symlink():
        removed = path.with_name(f".{path.name}.removed")
        remove(removed)
        path.rename(removed)
        remove(removed)


def remove(path: Path) -> None:
    """Removes a file or directory; of a link, only the link."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        remove_tree(path)


def flush(path: Path) -> None:
    """Waits until a file, or a directory's entries, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
