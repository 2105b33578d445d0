"""Jobs for the jail: one process each, so many at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf_host.scratch import Scratch
from rlhf_plugin_code_exec.tasks import Calls, Programs

HERE = Path(__file__).parent
JAIL, VALUES, SOLUTION, JUDGE = (HERE / f"{name}.py" for name in ("jail", "values", "solution", "judge"))
GRACE_S = 15.0
"""For the jail itself, beyond what its programs may take."""
STOP_S = 6.0
"""For the jail to end its programs when it is told to stop."""
Level = Literal["A", "B", "none"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one program."""

    seconds: float
    cpu_s: int
    memory: int
    """Bytes of address space, for each process."""
    processes: int
    file: int = 16 << 20
    """Bytes of a file."""
    output: int = 4 << 20

    @property
    def plain(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("cpu_s", "memory", "processes", "file", "output")}


class JailFailed(Exception):
    """The jail could not be set up or did not answer; it is not the program's fault."""


class Runner:
    """
    Args:
        python: the interpreter of contained programs.
        at_once: jobs at the same time.
        level: how they are contained.
    """

    def __init__(self, python: str, limits: Limits, at_once: int, level: Level = "A"):
        self.python, self.limits, self.level = python, limits, level
        self._slots: asyncio.Queue[int] | None = None
        self._at_once = at_once
        values, *sides = (file.read_text(encoding="utf-8") for file in (VALUES, SOLUTION, JUDGE))
        self._sources = [f"{values}\n\n{side}" for side in sides]

    async def tests(self, code: str, tests: Calls | Programs, *, first_only: bool = True) -> dict[str, Any]:
        """What the jail says of a program and its tests. Raises ``JailFailed``."""
        if isinstance(tests, Programs):
            more: dict[str, Any] = {"inputs": list(tests.inputs), "first_only": first_only}
        else:
            more = {"setup": tests.setup, "tests": tests.tests, "names": list(tests.names), "entry": ""}
        runs = len(tests.inputs) if isinstance(tests, Programs) else 1
        return await self._job({"code": code, **more}, runs * self.limits.seconds + GRACE_S)

    async def _job(self, job: dict[str, Any], within_s: float) -> dict[str, Any]:
        if self._slots is None:
            self._slots = asyncio.Queue()
            for slot in range(self._at_once):
                self._slots.put_nowait(slot)
        slot = await self._slots.get()
        try:
            scratch = Scratch("rlhf-code-", tempfile.gettempdir())  # which removes those of killed runs, too
            try:
                scratch.path.chmod(0o777)
                told = await self._run({**job, **self._settings(slot), "folder": str(scratch.path)}, within_s)
            finally:
                await asyncio.to_thread(scratch.close)
        except (OSError, RecursionError) as error:
            raise JailFailed(f"{type(error).__name__}: {error}") from error
        finally:
            self._slots.put_nowait(slot)
        results = told.get("results") or [told]
        if problem := next((result["problem"] for result in results if result.get("why") == "jail"), None):
            raise JailFailed(problem)
        return told

    def _settings(self, slot: int) -> dict[str, Any]:
        solution, judge = self._sources
        return {
            "slot": slot + os.getpid() % 1000 * 64,
            "level": self.level,
            "parent": os.getpid(),
            "python": [self.python, "-I", "-B", "-S", "-X", "int_max_str_digits=0"],
            "solution": solution,
            "judge": judge,
            "seconds": self.limits.seconds,
            "limits": self.limits.plain,
            "readable": readable(self.python),
        }

    async def _run(self, job: dict[str, Any], within_s: float) -> dict[str, Any]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(JAIL)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin"},
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(within_s):
                out, err = await process.communicate(json.dumps(job).encode())
        except TimeoutError as error:
            raise JailFailed(f"no answer in {within_s:g} s") from error
        finally:
            if process.returncode is None:
                await _stop(process)
        try:
            told: dict[str, Any] = json.loads(out)
            return told
        except ValueError as error:
            raise JailFailed(
                f"it ended with code {process.returncode}: {err.decode('utf-8', 'replace')[-300:].strip()}"
            ) from error


async def _stop(process: asyncio.subprocess.Process) -> None:
    """The jail ends its cells first; killed, it could leave what they started."""
    try:
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            process.terminate()
            async with asyncio.timeout(STOP_S):
                await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def readable(python: str) -> Sequence[str]:
    """What contained programs may read."""
    home = Path(os.path.realpath(python)).parent.parent
    places = ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/dev/urandom", "/dev/null", str(home)]
    return [place for place in places if os.path.exists(place)]


def reachable_python() -> str:
    """This interpreter, unless other users cannot reach it: then the system's."""
    own = os.path.realpath(sys.executable)
    if os.getuid() != 0 or all(folder.stat().st_mode & 0o001 for folder in Path(own).parents):
        return own
    return shutil.which("python3", path="/usr/bin:/bin:/usr/local/bin") or own
