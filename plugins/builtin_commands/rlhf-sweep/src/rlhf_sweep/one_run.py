"""The process of one run: ``rlhf`` with the words behind its first argument, which ends tidily when the sweep dies."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

GRACE_S = 120.0
"""Time for a checkpoint after the sweep has died."""
LOOK_S = 1.0
"""Seconds between two looks whether the run has ended."""


class RunProcess:
    """A started run: ``rlhf`` with these words, with its output in a file."""

    def __init__(self, words: Sequence[str], log: Path, cwd: str | None = None):
        log.parent.mkdir(parents=True, exist_ok=True)
        ends, self._alive = os.pipe()
        command = [sys.executable, "-m", "rlhf_sweep.one_run", str(ends), *words]
        try:
            with log.open("ab") as output:
                # In a session of its own: Ctrl-C in a terminal reaches every process of the sweep's, and runs get it once, from it.
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=cwd,
                    pass_fds=[ends],
                    start_new_session=True,
                )
        except BaseException:
            os.close(self._alive)
            raise
        finally:
            os.close(ends)

    def poll(self) -> int | None:
        """Returns the exit code, if it has ended."""
        code = self._process.poll()
        if code is not None and self._alive >= 0:
            os.close(self._alive)
            self._alive = -1
        return code

    def interrupt(self) -> None:
        """Asks it to write a checkpoint and to end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a sweep in the background of a script has it ignored
    run, pipe = os.getpid(), int(sys.argv[1])
    if not os.fork():  # a process, not a thread: --max-restarts forks the run, which programs with threads cannot
        try:
            _end_with_sweep(run, pipe)
        finally:
            os._exit(0)
    os.close(pipe)
    from rlhf_host.commands import main as rlhf

    rlhf(sys.argv[2:], prog_name="rlhf")


def _end_with_sweep(run: int, pipe: int) -> None:
    """Interrupts the run when the other end of the pipe is closed, and kills it if it has not ended in time."""
    while not select.select([pipe], [], [], LOOK_S)[0]:
        if os.getppid() != run:  # it has ended
            return
    _send(run, signal.SIGINT)
    deadline = time.monotonic() + GRACE_S
    while os.getppid() == run and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    _send(run, signal.SIGKILL)


def _send(run: int, number: int) -> None:
    if os.getppid() == run:  # else it has ended, and its number may be another's
        os.kill(run, number)


if __name__ == "__main__":
    main()
