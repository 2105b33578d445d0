"""One program: started in a process group of its own, with a deadline, and never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_host import UserError

TAIL = 64 << 10
"""So many bytes of each output are kept."""
GRACE_S = 5.0
"""Between asking a program to end, and ending it."""

_LIBC = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended, and the ends of what it wrote."""

    code: int
    stdout: str
    stderr: str

    @property
    def last_words(self) -> str:
        """The last line that it wrote about itself."""
        lines = [line.strip() for line in (self.stderr or self.stdout).splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it wrote nothing"


def _ends_with_its_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


async def run(command: Sequence[str], directory: Path, environment: Mapping[str, str]) -> Ended:
    """Run the command to its end; a cancelled run ends it and everything that it started. Raises ``UserError`` for a command that
    cannot be started."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=directory,
            env=dict(environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_ends_with_its_parent,
        )
    except OSError as error:
        raise UserError(f"agent.command: {command[0]} cannot be started: {error.strerror}") from error
    assert process.stdout is not None
    assert process.stderr is not None
    reading = [asyncio.ensure_future(_tail(stream)) for stream in (process.stdout, process.stderr)]
    try:
        code = await process.wait()
    except asyncio.CancelledError:
        await asyncio.shield(_end(process))
        raise
    finally:
        _kill(process.pid, signal.SIGKILL)  # what it started and left behind
        texts = await asyncio.gather(*reading)
    return Ended(code, *texts)


async def _tail(stream: asyncio.StreamReader) -> str:
    kept = b""
    while chunk := await stream.read(1 << 16):
        kept = (kept + chunk)[-TAIL:]
    return kept.decode("utf-8", "replace")


async def _end(process: asyncio.subprocess.Process) -> None:
    _kill(process.pid, signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), GRACE_S)
    _kill(process.pid, signal.SIGKILL)
    await process.wait()


def _kill(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
