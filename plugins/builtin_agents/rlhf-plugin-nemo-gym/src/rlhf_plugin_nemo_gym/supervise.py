"""Runs a command until it ends or standard input closes, and then ends everything that it started. Needs nothing but Python.

Whoever starts this holds the other end of standard input, so the command never outlives it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

GRACE_S = 8.0
"""Seconds between asking the command to end, and killing it."""
_PR_SET_CHILD_SUBREAPER = 36


def main(command: list[str]) -> int:
    if sys.platform.startswith("linux"):
        # What the command leaves behind, in whatever session, becomes a child of this process.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _interrupted)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    code = None
    with contextlib.suppress(InterruptedError):
        while (code := _ended(child.pid)) is None and not _closed():
            pass
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if code is None:
        _kill(child.pid, signal.SIGINT)
        until = time.monotonic() + GRACE_S
        while (code := _ended(child.pid)) is None and time.monotonic() < until:
            time.sleep(0.05)
    _kill(child.pid, signal.SIGKILL)
    until = time.monotonic() + GRACE_S
    while (left := _descendants(os.getpid())) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        _ended(child.pid)
        time.sleep(0.05)
    return 0 if code is None else code


def _interrupted(number: int, frame: object) -> None:
    raise InterruptedError


def _closed() -> bool:
    """Returns True at the end of standard input, after waiting a moment for it."""
    ready, _, _ = select.select([0], [], [], 0.2)
    return bool(ready) and not os.read(0, 1024)


def _ended(pid: int) -> int | None:
    """Returns the exit code of ``pid``, once. Reaps all other children that ended."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == pid:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _descendants(pid: int) -> list[int]:
    """Returns the descendants that still run; nothing if there is no ``/proc``."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            children = [int(word) for word in file.read().split()]
    except OSError:
        return []
    return [one for child in children for one in (child, *_descendants(child))]


def _kill(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
