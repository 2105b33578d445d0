"""Directories of the cache, which are made once, whatever several processes do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlhf_host import Scratch
from rlhf_host.internals import flush, remove_directory, unwritable_cache


def fill_cache(path: Path, fill: Callable[[Path], None], is_whole: Callable[[], bool]) -> None:
    """Makes the directory ``path`` of the cache, completely or not at all, even if other processes do the same.

    Args:
        fill: writes the files.
        is_whole: returns True if an existing ``path`` can be used; otherwise it is replaced.

    Raises:
        UserError: it cannot be written.
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
        raise unwritable_cache(root, error) from error
