"""Jobs for the jail: one process each, a limited number at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import marshal
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rlhf_host import Scratch
from rlhf_plugin_code_exec.forms import Cases, Programs, Tests
from rlhf_plugin_code_exec.interpreters import Interpreter, interpreter_at
from rlhf_plugin_code_exec.suites import Suite

JAIL = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); from jail.main import main; main()"
GRACE_S = 15.0
"""Seconds for the jail itself, beyond the time of its programs."""
STOP_S = 6.0
"""Seconds for the jail to end its programs when it is told to stop."""
Level = Literal["A", "B", "none"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one program, with all its processes."""

    seconds: float
    cpu_s: int
    """Seconds of each process."""
    memory: int
    """Bytes."""
    processes: int
    file: int = 2 << 20
    """Bytes of a file."""
    files: int = 32
    output: int = 4 << 20

    @property
    def plain(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("cpu_s", "memory", "processes", "file", "files", "output")}


class JailFailed(Exception):
    """The jail could not be set up or did not answer; it is not the program's fault."""


class Runner:
    """Runs jobs in jails.

    Args:
        python: the interpreter of contained programs.
        at_once: number of jobs at the same time.
        level: level of containment.
    """

    def __init__(self, python: str, limits: Limits, at_once: int, level: Level = "A"):
        self.python, self.limits, self.level = python, limits, level
        self._at_once = at_once
        self._free: asyncio.Semaphore | None = None

    async def tests(
        self, code: str, tests: Tests, *, first_only: bool = True, plan: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the jail's result of a program and its tests, which run as ``plan`` says. Raises ``JailFailed``."""
        if isinstance(tests, Programs):
            inputs = {"inputs": list(tests.inputs), "first_only": first_only}
            return await self._job({"code": code, **inputs}, len(tests.inputs) * self.limits.seconds + GRACE_S)
        if isinstance(tests, Cases):
            told: dict[str, Any] = {**asdict(tests), "first_only": first_only}
        else:
            told = {**asdict(tests), "plan": plan}
        shares_files = isinstance(tests, Suite) and tests.files
        job = {"code": code, "tests": json.dumps(told).encode(), "shares_files": shares_files}
        return await self._job(job, self.limits.seconds + GRACE_S)

    async def rehearsed(self, tests: Suite, agrees: bool) -> dict[str, Any]:
        """Returns what tests do without a solution: ``plan``, or ``unusable``, or neither. Raises ``JailFailed``."""
        told = {**asdict(tests), "rehearses": agrees}
        job = {"tests": json.dumps(told).encode(), "shares_files": False}
        [result] = (await self._job(job, self.limits.seconds + GRACE_S))["results"]
        try:
            verdict: dict[str, Any] = json.loads(result["verdict"])
        except ValueError:  # it took too long, or too much
            return {}
        return verdict

    def within(self, seconds: float, memory: int, processes: int) -> Runner:
        """Returns the same runner with other limits."""
        limits = replace(self.limits, seconds=seconds, memory=memory, processes=processes)
        return Runner(self.python, limits, self._at_once, self.level)

    async def _job(self, job: dict[str, Any], within_s: float) -> dict[str, Any]:
        self._free = self._free or asyncio.Semaphore(self._at_once)
        async with self._free:
            try:
                interpreter = await asyncio.to_thread(interpreter_at, self.python)
                scratch = Scratch("rlhf-code-", tempfile.gettempdir())  # which removes those of killed runs, too
                try:
                    told = await self._run({**job, **self._settings(interpreter), "folder": str(scratch.path)}, within_s)
                finally:
                    await asyncio.to_thread(scratch.close)
            except (OSError, RecursionError) as error:
                raise JailFailed(f"{type(error).__name__}: {error}") from error
        results = told.get("results") or [told]
        if problem := next((result["problem"] for result in results if result.get("why") == "jail"), None):
            raise JailFailed(problem)
        return told

    def _settings(self, interpreter: Interpreter) -> dict[str, Any]:
        return {
            "level": self.level,
            "parent": os.getpid(),
            "python": [interpreter.executable, "-I", "-B", "-S", "-X", "int_max_str_digits=0"],
            "starts": interpreter.starts,
            "modules": interpreter.modules,
            "seconds": self.limits.seconds,
            "limits": self.limits.plain,
            "readable": interpreter.readable,
        }

    async def _run(self, job: dict[str, Any], within_s: float) -> dict[str, Any]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", JAIL),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin"},
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(within_s):
                out, err = await process.communicate(marshal.dumps(job))
        except TimeoutError as error:
            raise JailFailed(f"no answer in {within_s:g} s") from error
        finally:
            if process.returncode is None:
                await _stop(process)
        try:
            told: dict[str, Any] = marshal.loads(out)
            return told
        except (ValueError, EOFError, TypeError) as error:
            raise JailFailed(
                f"it ended with code {process.returncode}: {err.decode('utf-8', 'replace')[-300:].strip()}"
            ) from error


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Stops the jail, which ends its cells first; if it were killed, it could leave their processes behind."""
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
