"""Temporary directories that are removed with their process, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

YOUNG_S = 60.0
"""Age in seconds below which a directory without a lock may be a new one."""


class Scratch:
    """A new directory ``prefix…`` in ``root``, locked by this process.

    Directories that killed processes left there under this prefix are removed: their locks are gone. (Process numbers would not
    tell: containers may share the directory but not the numbers.)
    """

    def __init__(self, prefix: str, root: str | Path):
        for left in Path(root).glob(f"{prefix}*"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > YOUNG_S and (held := lock(left)) is not None:
                    remove_tree(left)
                    os.close(held)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        self._lock = lock(self.path)

    def close(self) -> None:
        """Removes it. May be called any number of times."""
        remove_tree(self.path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def remove_tree(path: Path) -> None:
    """Removes a folder and everything in it, however deep; what cannot be removed stays."""
    try:
        shutil.rmtree(path, ignore_errors=True)
    except RecursionError:  # a call per level
        with contextlib.suppress(OSError):
            subprocess.run(["rm", "-rf", "--", path], stderr=subprocess.DEVNULL, check=False)


def lock(directory: Path) -> int | None:
    """Returns the open directory, locked; None if another process has the lock."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        return None
    return opened
