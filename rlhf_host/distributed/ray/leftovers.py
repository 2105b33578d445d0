"""Processes of a Ray cluster whose controller was killed. They are ended before another cluster is made."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from rlhf_host.scratch import lock, remove_tree

PREFIX = "rlhf-ray-"
"""Prefix of the directories in which runs make clusters. Their controllers hold a lock on them."""
WAIT_S = 10.0
"""Seconds to wait for ended processes to be gone."""

_FILE_OF_RAY = re.compile(rf"(.*/{PREFIX}[^/]+)/session_[^/]+/")


def end_leftovers() -> None:
    """Ends the processes that killed controllers left, wherever their directories are, and removes these. Clusters with a live
    controller are left alone.

    Ray's agents would stay for a minute and workers for seconds, with their memory and devices. All that Ray starts writes logs
    beneath the directory of its cluster, and so do the children of these; the controller's other children do not. (Command
    lines and environments would not tell: Ray's titles overwrite them.)
    """
    clusters: dict[Path, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if (directory := _cluster_of(entry)) is not None:
            clusters.setdefault(directory, []).append(int(entry.name))
    for directory, pids in clusters.items():
        try:
            held = lock(directory)
        except OSError:  # it is gone, or not ours: nothing says whether the controller lives
            continue
        if held is not None:
            _end(pids, directory)
            remove_tree(directory)
            os.close(held)


def _cluster_of(process: Path) -> Path | None:
    """Returns the directory of the cluster whose files a process of this user writes."""
    with contextlib.suppress(OSError):  # it has ended, or hides
        if process.stat().st_uid == os.geteuid():
            for opened in (process / "fd").iterdir():
                with contextlib.suppress(OSError):  # it is closed by now
                    writes = opened.lstat().st_mode & stat.S_IWUSR  # who reads along is left alone
                    if writes and (file := _FILE_OF_RAY.match(os.readlink(opened))) is not None:
                        return Path(file[1])
    return None


def _end(pids: Sequence[int], directory: Path) -> None:
    """Kills them, and waits until they are gone. It looks at each again, because process numbers are reused."""

    def left() -> list[int]:
        return [pid for pid in pids if _cluster_of(Path("/proc", str(pid))) == directory]

    for pid in left():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + WAIT_S
    while left() and time.monotonic() < deadline:
        time.sleep(0.05)
