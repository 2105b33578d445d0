"""One program: started in its own process group, with a deadline, and never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_host import UserError

TAIL = 64 << 10
"""Number of last bytes of each output that are kept."""
GRACE_S = 5.0
"""Seconds between asking a program to end, and killing it."""
ROUNDS, ROUND_S = 20, 0.05
"""Looks for processes that a program has left, and seconds between two of them."""
DRAIN_S = 2.0
"""Seconds for its last output, once it has ended."""

MARK = "RLHF_PROGRAM"
"""Environment variable by which the processes of one program are known, whatever session they are in."""

_LIBC = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Ended:
    """End of a program: how it ended, and the last part of its output."""

    code: int
    stdout: str
    stderr: str

    @property
    def last_words(self) -> str:
        """Last line that it wrote about itself."""
        lines = [line.strip() for line in (self.stderr or self.stdout).splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it wrote nothing"


def _ends_with_its_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


async def run(command: Sequence[str], directory: Path, environment: Mapping[str, str]) -> Ended:
    """Runs the command to its end, and ends everything that it started, also in sessions of its own (Linux); so does a cancelled
    run. Raises ``UserError`` for a command that cannot be started.
    """
    mark = secrets.token_hex(16)
    async with _Tail() as stdout, _Tail() as stderr:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=directory,
                env={**environment, MARK: mark},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=stdout.given,
                stderr=stderr.given,
                start_new_session=True,
                preexec_fn=_ends_with_its_parent,
            )
        except OSError as error:
            raise UserError(f"agent.command: {command[0]} cannot be started: {error.strerror}") from error
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            await asyncio.shield(_end(process))
            raise
        finally:
            _kill(process.pid, signal.SIGKILL)  # what it started and left behind
            await asyncio.shield(asyncio.to_thread(_end_marked, mark))
    return Ended(code, stdout.text, stderr.text)


class _Tail:
    """A pipe for a program, whose last part is kept. ``asyncio``'s own pipes are waited for as long as any process holds them,
    such as one that the program started in another session.
    """

    async def __aenter__(self) -> _Tail:
        self._kept = b""
        end, self.given = os.pipe()
        stream = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        self._pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(end, "rb"))
        self._reading = asyncio.ensure_future(self._read(stream))
        return self

    async def __aexit__(self, *_: object) -> None:
        os.close(self.given)
        try:
            await asyncio.wait([self._reading], timeout=DRAIN_S)
        finally:
            self._reading.cancel()
            self._pipe.close()

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(1 << 16):
            self._kept = (self._kept + chunk)[-TAIL:]

    @property
    def text(self) -> str:
        return self._kept.decode("utf-8", "replace")


async def _end(process: asyncio.subprocess.Process) -> None:
    _kill(process.pid, signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), GRACE_S)
    _kill(process.pid, signal.SIGKILL)
    await process.wait()


def _end_marked(mark: str) -> None:
    """Kills the processes whose environment has the mark, until there is none: one may start another meanwhile."""
    told = f"{MARK}={mark}\0".encode()
    for _ in range(ROUNDS):
        left = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if told in _read(path)]
        for number in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(number, signal.SIGKILL)
        if not left:
            return
        time.sleep(ROUND_S)


def _read(path: Path) -> bytes:
    """Returns what a file of a process has; nothing where it is gone, or another user's."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _kill(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
