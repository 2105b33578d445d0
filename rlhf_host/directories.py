"""Directories that appear and disappear whole, whenever the process is killed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def write_directory(path: Path, fill: Callable[[Path], None]) -> None:
    """Make ``path`` by filling a hidden sibling, syncing it to disk and renaming; an older ``path`` is replaced last."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    fill(aside)
    for directory, _, files in os.walk(aside):
        for name in files:
            flush(Path(directory) / name)
        flush(Path(directory))
    old = path.with_name(f".{path.name}.old")
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    aside.rename(path)
    flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_directory(path: Path) -> None:
    """Rename first, so that a killed removal never leaves half a directory under its name."""
    if path.exists():
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        shutil.rmtree(old, ignore_errors=True)


def flush(path: Path) -> None:
    """Wait until a file, or a directory's entries, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
