"""Calls of the system for one process that watches another: who ends with whom, what a dead process has left, one per run."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import sys
import time
from collections.abc import Container, Iterator
from pathlib import Path
from typing import NamedTuple

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


class Process(NamedTuple):
    number: int
    state: str
    parent: int
    started: int
    """Start in ticks since the system began: with it a number that the system gives again is another process."""

    @property
    def identity(self) -> tuple[int, int]:
        return self.number, self.started


class Earlier(NamedTuple):
    """Identities of what the caller had started before its run: no leftovers of the run."""

    children: frozenset[tuple[int, int]] = frozenset()
    """The caller's own, whose exit codes it may ask for."""
    all: frozenset[tuple[int, int]] = frozenset()

    @classmethod
    def now(cls) -> Earlier:
        everything = list(_below({}))
        own = (each.identity for each in everything if each.parent == os.getpid())
        return cls(frozenset(own), frozenset(each.identity for each in everything))


def descendants(earlier: Earlier) -> list[int]:
    """Returns the living processes below this one, without earlier ones and what those have started."""
    return [each.number for each in _below(earlier.all) if each.state not in "ZX"]


def _below(spared: Container[tuple[int, int]]) -> Iterator[Process]:
    """Yields the processes below this one, also dead ones that nobody has waited for."""
    children: dict[int, list[Process]] = {}
    for each in _processes():
        if each.identity not in spared:
            children.setdefault(each.parent, []).append(each)
    waiting = [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        yield from below
        waiting += [each.number for each in below]


def _processes() -> Iterator[Process]:
    """Yields each process that can be seen."""
    for entry in Path("/proc").glob("[0-9]*"):
        if (process := _process(int(entry.name))) is not None:
            yield process


def _process(number: int) -> Process | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        return Process(number, fields[0], int(fields[1]), int(fields[19]))
    return None


def end_leftovers(earlier: Earlier) -> int:
    """Ends what a dead run has left of its processes, and returns how many had to be killed."""
    killed: set[int] = set()
    deadline = time.monotonic() + GRACE_S
    while left := descendants(earlier):
        if time.monotonic() > deadline:
            for number in left:
                killed.add(number)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(number, signal.SIGKILL)
        reap(earlier)
        time.sleep(0.05)
        if time.monotonic() > deadline + GRACE_S:  # as one that waits for a disk
            break
    reap(earlier)
    return len(killed)


def reap(earlier: Earlier, but: int = 0) -> None:
    """Lets go of children that have ended, without the caller's own and the one with the number ``but``."""
    for listed in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for number in map(int, listed.read_text().split()):
                process = _process(number) if number != but else None
                if process is not None and process.identity not in earlier.children:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(number, os.WNOHANG)
