"""What the system offers for one process that watches another: who ends with whom, what a dead process has left, one per run."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rlhf_host import UserError

DIES_WITH_PARENT, ADOPTS = 1, 36
"""``PR_SET_PDEATHSIG`` and ``PR_SET_CHILD_SUBREAPER`` of ``prctl``."""
GRACE_S = 10.0
"""Seconds in which the rest of a dead run may end by itself, as Ray's processes do, before it is killed."""


def hold(run_dir: Path) -> int | None:
    """Holds the run for this process, as long as it lives, and returns the descriptor. Raises ``UserError`` if another has it."""
    held = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise UserError(f"{run_dir} is kept running by another process with --max-restarts: wait for it or stop it") from None
    except OSError:  # directories cannot be locked there, as on NFS: the run's own lock refuses a second process
        os.close(held)
        return None
    return held


def adopt_orphans() -> None:
    """Makes this process the parent of what its children leave behind. Only Linux can do that."""
    _prctl(ADOPTS, 1)


def end_with(parent: int) -> None:
    """Lets the system send SIGTERM to this process when its parent, a process with this number, is gone."""
    _prctl(DIES_WITH_PARENT, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def descendants() -> list[int]:
    """Returns the living processes below this one."""
    children: dict[int, list[int]] = {}
    for number, state, parent in _processes():
        if state not in "ZX":
            children.setdefault(parent, []).append(number)
    found, waiting = [], [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _processes() -> Iterator[tuple[int, str, int]]:
    """Yields number, state and parent of each process that can be seen."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            yield int(entry.name), state, int(parent)


def end_leftovers() -> int:
    """Ends what a dead run has left of its processes, and returns how many had to be killed."""
    killed: set[int] = set()
    deadline = time.monotonic() + GRACE_S
    while left := descendants():
        if time.monotonic() > deadline:
            for number in left:
                killed.add(number)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(number, signal.SIGKILL)
        reap()
        time.sleep(0.05)
        if time.monotonic() > deadline + GRACE_S:  # as one that waits for a disk
            break
    reap()
    return len(killed)


def reap() -> None:
    """Lets go of children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
