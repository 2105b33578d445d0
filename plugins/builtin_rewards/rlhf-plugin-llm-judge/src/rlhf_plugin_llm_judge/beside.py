"""Runs a command until it ends or standard input closes, and then ends it with what it started. Needs nothing but Python.

Whoever starts this holds the other end of standard input, so the command never outlives it, however it dies.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

GRACE_S = 8.0
"""Seconds between asking the command to end, and killing it."""


def main(command: list[str]) -> int:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _interrupted)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    with contextlib.suppress(InterruptedError):
        while child.poll() is None and not _closed():
            pass
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    asked = child.poll() is None
    for number in (signal.SIGINT, signal.SIGKILL):  # the second one also for what the command left behind
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
        until = time.monotonic() + GRACE_S
        while child.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
    return 0 if asked else child.returncode


def _interrupted(number: int, frame: object) -> None:
    raise InterruptedError


def _closed() -> bool:
    """Returns True at the end of standard input, after waiting a moment for it."""
    ready, _, _ = select.select([0], [], [], 0.2)
    return bool(ready) and not os.read(0, 1024)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
