"""Contained shells: for agents whose policy works in a folder by commands."""

from __future__ import annotations

import asyncio
import glob
import marshal
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rlhf_host import Scratch
from rlhf_plugin_code_exec.interpreters import CONTAINED, interpreter_at, is_within
from rlhf_plugin_code_exec.runner import GRACE_S, JAIL, JailFailed, Level, Limits, _stop

LONGEST_COMMAND = 100_000
"""Bytes of a command, because Linux allows few more for an argument."""
HOMES = ("/work", "/workspace", "/shell-work")
ALSO_READABLE = (
    *("/etc/alternatives", "/etc/ssl/openssl.cnf", "/etc/localtime", "/etc/magic", "/etc/mime.types", "/dev/zero"),
    *sorted(glob.glob("/etc/java-*-openjdk")),
)
"""Settings of programs, the same for all users."""
PYTHON = "python"
"""Folder of modules that interpreters find, where there is no file system of its own."""
MODULES = {"sitecustomize.py": "shell_start", "rlhf_semaphores.py": "semaphores"}
Why = Literal["ended", "late", "output", "memory", "disk", "files"]


@dataclass(frozen=True, slots=True)
class ShellLimits:
    """Limits of a command with all its processes, and of all files of a shell together."""

    cpu_s: int = 60
    """Seconds of each process."""
    memory: int = 1 << 30
    """Bytes."""
    processes: int = 64
    """Threads count, too."""
    file: int = 64 << 20
    """Bytes of a file."""
    files: int = 1000
    disk: int = 256 << 20
    """Bytes of all files."""
    output: int = 4 << 20
    cpus: int = 1 << 10
    """Processors that the processes of a command share."""

    @property
    def plain(self) -> dict[str, Any]:
        """The limits as the jail reads them."""
        names = ("cpu_s", "memory", "processes", "file", "files", "disk", "output", "cpus")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Ran:
    """Outcome of a command."""

    why: Why
    """``ended`` by itself, or why it was ended: too ``late``, or too much ``output``, ``memory``, ``disk`` or
    ``files``."""
    code: int | None
    """Exit code; ``None`` if it was ended."""
    output: str
    """Standard output and error, as they were written."""
    seconds: float
    lost: bool = False
    """True if the next command does not have its variables, because they are too many."""


@dataclass(frozen=True, slots=True)
class File:
    """A file to be made."""

    content: bytes
    runs: bool = False
    """True if it is a program."""


class Shell:
    """A shell in a folder of its own. Its commands have files, working folder, exported variables and functions in common; their
    processes end with them.

    Args:
        python: interpreter of commands, which the others of the machine may read.
        level: as ``strictest_level`` found it.
        work: path of the working folder, such as ``/app``, in a file system of its own, which also has ``/tmp``; empty: the real
            path, and no file system of its own. Needs level A.
    """

    def __init__(self, python: str, limits: ShellLimits, level: Level, work: str = ""):
        self.python, self.limits, self.level, self.work = python, limits, level, work
        self._process: asyncio.subprocess.Process | None = None
        self._scratch: Scratch | None = None
        self._turn = asyncio.Lock()
        self._modules: dict[str, str] = {}

    async def open(self) -> None:
        """Starts it. Raises ``JailFailed``."""
        if self.work and self.level != "A":
            raise JailFailed(f"paths such as {self.work} need a file system of their own, which this machine does not allow")
        bash = shutil.which("bash", path="/bin:/usr/bin")
        if bash is None:
            raise JailFailed("this machine has no /bin/bash")
        try:
            interpreter = await asyncio.to_thread(interpreter_at, self.python)
        except OSError as error:
            raise JailFailed(f"{type(error).__name__}: {error}") from error
        if self.work and any(is_within(place, [self.work]) for place in interpreter.readable):
            raise JailFailed(f"the working folder {self.work} would hide {self.python}: name another interpreter (python)")
        try:
            self._scratch = await asyncio.to_thread(Scratch, "rlhf-shell-", tempfile.gettempdir())
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", JAIL),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={"PATH": "/usr/bin:/bin"},
                start_new_session=True,
            )
        except OSError as error:
            raise JailFailed(f"{type(error).__name__}: {error}") from error
        readable = [*interpreter.readable, *filter(os.path.exists, ALSO_READABLE)]
        job = {"shell": True, "work": self.work, "bash": bash, "level": self.level, "parent": os.getpid(), "readable": readable}
        await self._ask({**job, "limits": self.limits.plain, "folder": str(self._scratch.path)}, GRACE_S)
        if not self.work:
            texts = {name: File((CONTAINED / f"{module}.py").read_bytes()) for name, module in MODULES.items()}
            await self.put(texts, PYTHON)
            self._modules = {"PYTHONPATH": str(self._scratch.path / PYTHON)}

    async def put(self, files: Mapping[str, File], into: str = "work") -> None:
        """Makes files. Raises ``JailFailed``, also for a file that exists, and ``ValueError`` for a name that leaves the folder.

        Args:
            files: path below the folder → file.
            into: ``work``, or a new folder that commands may only read, and only those that ask for it.
        """
        for name in files:
            if not name or any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
                raise ValueError(f"a file {name!r} cannot be made: give a path below the folder, such as src/main.py")
        plain = {name: (file.content, file.runs) for name, file in files.items()}
        await self._ask({"do": "put", "into": into, "files": plain}, GRACE_S)

    async def logs(self, folders: Sequence[str] = ()) -> None:
        """Makes the folder ``logs`` anew, with these folders: commands that ask for it may write there. Raises ``JailFailed``."""
        await self._ask({"do": "logs", "folders": list(folders)}, GRACE_S)

    async def read(self, path: str, most: int = 1 << 16) -> bytes | None:
        """Returns the beginning of a file below ``work`` or ``logs``, such as ``logs/reward.txt``; ``None`` without one, and for a
        link.
        """
        content: bytes | None = (await self._ask({"do": "get", "path": path, "most": most}, GRACE_S))["content"]
        return content

    async def run(
        self,
        command: str,
        seconds: float,
        *,
        fresh: bool = False,
        sees: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> Ran:
        """Runs a command with ``bash``. Raises ``JailFailed``, and ``ValueError`` for one that is too long or has a zero byte.

        Args:
            seconds: its deadline.
            fresh: it starts as the first one would, and leaves files only.
            sees: the folders of ``put`` and ``logs`` that it has; the variables ``NAME_DIR`` lead there.
            variables: environment variables beside the usual ones.
        """
        encoded = command.encode("utf-8", "replace")
        if len(encoded) > LONGEST_COMMAND or b"\0" in encoded:
            raise ValueError(f"a command has at most {LONGEST_COMMAND} bytes, and no zero byte")
        request = {"do": "run", "command": encoded.decode(), "seconds": seconds, "fresh": fresh}
        request["sees"] = [*sees, *([PYTHON] if self._modules else [])]
        told = await self._ask({**request, "variables": {**self._modules, **(variables or {})}}, seconds + GRACE_S)
        code = told["code"] if told["why"] == "ended" else None
        return Ran(told["why"], code, told["output"].decode("utf-8", "replace"), told["s"], told["lost"])

    async def close(self) -> None:
        """Ends it and removes everything. May be called any number of times, also while it is being asked."""
        process, self._process = self._process, None
        scratch, self._scratch = self._scratch, None
        try:
            if process is not None:
                await _stop(process)
        finally:
            if scratch is not None:
                await asyncio.shield(asyncio.to_thread(_remove, scratch))

    async def _ask(self, request: dict[str, Any], within_s: float) -> dict[str, Any]:
        async with self._turn:
            process = self._process
            if process is None or process.stdin is None or process.stdout is None:
                raise JailFailed("the shell is closed")
            try:
                async with asyncio.timeout(within_s):
                    process.stdin.write(marshal.dumps(request))
                    await process.stdin.drain()
                    (length,) = struct.unpack("<Q", await process.stdout.readexactly(8))
                    told: dict[str, Any] = marshal.loads(await process.stdout.readexactly(length))
            except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
                await self.close()
                raise JailFailed(f"the shell is gone: {type(error).__name__}") from error
            except asyncio.CancelledError:
                await self.close()  # its answer would be read as that of the next request
                raise
        if told["why"] == "jail":
            raise JailFailed(told["problem"])
        return told


def limits_within(limits: ShellLimits, **less: int | None) -> ShellLimits:
    """Returns limits of which none is above the given ones: a task may ask for less than the run allows."""
    named = {name: min(value, getattr(limits, name)) for name, value in less.items() if value is not None}
    return replace(limits, **named)


def home(python: str) -> str:
    """Returns a path for the working folder of a shell that has a file system of its own: one that hides nothing of an
    interpreter. Raises ``OSError`` if this does not answer.
    """
    readable = interpreter_at(python).readable
    return next((each for each in HOMES if not any(is_within(place, [each]) for place in readable)), HOMES[0])


def _remove(scratch: Scratch) -> None:
    path = scratch.path
    scratch.close()
    if path.exists():  # folders within folders, more than a process may have open
        subprocess.run(["rm", "-rf", "--", path], stderr=subprocess.DEVNULL, check=False)


__all__ = ["File", "JailFailed", "Level", "Limits", "Ran", "Shell", "ShellLimits", "home", "limits_within"]
