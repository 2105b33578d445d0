"""Processes with verifiers: started on demand, and once more if one has died."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rlhf_host import EpisodeFailed, RunError, UserError

log = logging.getLogger(__name__)

WORKER = str(Path(__file__).with_name("worker.py"))
PASSED = ("HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")
"""Environment variables that are passed on, with those that configure uv, pip and caches: programs that a model controls get no
keys of yours.
"""
PREFIXES = ("UV_", "PIP_", "XDG_", "HF_")
SECRET = ("KEY", "TOKEN", "PASS", "SECRET", "AUTH", "CREDENTIAL", "COOKIE")
LOGIN = re.compile(r"://[^/\s]*@")
"""Name or password in an address, such as that of a package index."""
LAST_LINES = 20
LINE_BYTES = 64 << 20
ENDS_S = 10.0


@dataclass(frozen=True, slots=True)
class Place:
    """An environment of verifiers, and its Python."""

    option: str
    """Start of its options on the command line."""
    python: str
    environment: str
    args: str
    env: Sequence[str] = ()

    def first(self, op: str, **more: Any) -> bytes:
        """Returns the first request to every worker. Raises ``UserError`` for invalid options."""
        if not os.access(self.command[0], os.X_OK) or os.path.isdir(self.command[0]):
            raise UserError(
                f"{self.option}.python {self.python}: there is no such interpreter; make setup-verifiers makes build/verifiers,"
                " or: python -m venv DIR && DIR/bin/python -m pip install verifiers==0.4.0 uv, and give DIR/bin/python"
            )
        if self.environment.endswith(".py") and not Path(self.environment).is_file():
            raise UserError(f"{self.option}.environment {self.environment}: there is no such file")
        try:
            args = json.loads(self.args)
        except ValueError as error:
            raise UserError(f"{self.option}.args {self.args!r} is no JSON: {error}") from error
        if not isinstance(args, dict) or not isinstance(args.get("taskset", {}), dict):
            raise UserError(f'{self.option}.args {self.args!r}: give an object, such as {{"taskset": {{"split": "train"}}}}')
        return _line(op=op, environment=self.environment, args=args, **more)

    @property
    def command(self) -> list[str]:
        return [str(Path(self.python).expanduser().absolute()), WORKER]

    @property
    def variables(self) -> dict[str, str]:
        passed = {name: os.environ[name] for name in (*PASSED, *self.env) if name in os.environ}
        for name, value in os.environ.items():
            if name.startswith(PREFIXES) and not any(word in name.upper() for word in SECRET) and not LOGIN.search(value):
                passed[name] = value
        path = f"{Path(self.command[0]).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        return {**passed, "PATH": path, "PYTHONUNBUFFERED": "1"}

    def refused(self, told: Mapping[str, Any]) -> UserError:
        text = told["message"] if told.get("wrong") else f"{told['type']}: {told['message']}"
        name = "python" if "cannot be imported there" in text else "environment"
        return UserError(f"{self.option}.{name} {getattr(self, name)}: {text}")


def load_tasks(place: Place, skip: int, size: int | None, timeout_s: float) -> list[dict[str, Any]]:
    """Returns the data of tasks, from a worker used only for this. Raises ``UserError``."""
    first = place.first("tasks", skip=skip, size=size)
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            place.command, stdin=pipe, stdout=pipe, stderr=pipe, env=place.variables, start_new_session=True
        )
    except OSError as error:
        raise UserError(f"{place.option}.python {place.python} cannot be started: {error.strerror}") from error
    try:
        out, printed = process.communicate(first, timeout_s)
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"{place.option}.environment {place.environment}: no tasks in {timeout_s:g} s ({place.option}.start-timeout-s)"
        ) from error
    finally:
        _ended(process)
    try:
        told = json.loads(out)
    except ValueError as error:
        last = "\n".join(printed.decode("utf-8", "replace").splitlines()[-LAST_LINES:])
        raise UserError(
            f"{place.option}.environment {place.environment}: the worker ended with exit code {process.returncode}:\n{last}"
        ) from error
    if "error" in told:
        raise place.refused(told["error"])
    rows: list[dict[str, Any]] = told["ok"]
    return rows


def _ended(process: subprocess.Popen[bytes]) -> None:
    """Ends a worker that still runs, even if it is interrupted or busy."""
    with process:
        if process.poll() is None:
            process.terminate()  # at which all of it ends
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDS_S)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)


class Gone(Exception):
    """The worker is gone."""


@dataclass(slots=True)
class Worker:
    """One process."""

    place: Place
    output: IO[bytes]
    """Its standard error."""
    starts: int = 0
    gone: bool = True
    episodes: int = 0
    """Number of its episodes, including those that wait for its start."""
    _process: asyncio.subprocess.Process | None = None
    _reading: asyncio.Task[None] | None = None
    _waiting: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)
    _numbers: Any = field(default_factory=lambda: itertools.count(1))

    async def start(self, timeout_s: float) -> None:
        """Starts the worker. Raises ``UserError`` if that is not possible, ``RunError`` if it died for the second time."""
        place, first = self.place, self.place.first("serve")
        await self.end()
        self.starts += 1
        if self.starts > 2:
            raise RunError(f"verifiers: the worker died a second time{self.last_lines()}")
        if self.starts == 2:
            log.warning("verifiers: the worker died; it is started again%s", self.last_lines())
        try:
            self._process = await asyncio.create_subprocess_exec(
                *place.command,
                env=place.variables,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=self.output,
                limit=LINE_BYTES,
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(f"{place.option}.python {place.python} cannot be started: {error.strerror}") from error
        self.gone = False
        self._reading = asyncio.ensure_future(self._read(self._process))
        try:
            async with asyncio.timeout(timeout_s):
                told = await self._ask(0, first)
        except (Gone, TimeoutError) as error:
            await self.end()
            why = "died" if isinstance(error, Gone) else f"was not ready in {timeout_s:g} s ({place.option}.start-timeout-s)"
            raise UserError(f"{place.option}.environment {place.environment}: the worker {why}{self.last_lines()}") from error
        except BaseException:
            await asyncio.shield(self.end())
            raise
        if "error" in told:
            await self.end()
            raise place.refused(told["error"])

    async def play(self, timeout_s: float, **request: Any) -> dict[str, Any]:
        """Plays an episode. Raises ``Gone``, and ``TimeoutError``; a worker that is late and cannot be interrupted is ended."""
        number = next(self._numbers)
        asked = asyncio.ensure_future(self._ask(number, _line(id=number, op="play", **request)))
        try:
            done, _ = await asyncio.wait([asked], timeout=timeout_s)
            if not done:
                raise TimeoutError
            return asked.result()
        finally:
            if not asked.done() and not self.gone:
                self._send(_line(id=number, op="cancel"))
                done, _ = await asyncio.shield(asyncio.ensure_future(asyncio.wait([asked], timeout=ENDS_S)))
                if not done:
                    log.warning("verifiers: an episode that is over cannot be interrupted; its worker is ended")
                    await asyncio.shield(self.end())
            asked.cancel()

    async def end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), ENDS_S if not self.gone else 2.0)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)  # at which all of it ends
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), ENDS_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        if self._reading is not None:
            await asyncio.wait([self._reading])

    def last_lines(self) -> str:
        self.output.seek(0, os.SEEK_END)
        self.output.seek(max(0, self.output.tell() - (64 << 10)))
        lines = self.output.read().decode("utf-8", "replace").splitlines()[-LAST_LINES:]
        return "; the end of its log:\n" + "\n".join(lines) if lines else ""

    async def _ask(self, number: int, line: bytes) -> dict[str, Any]:
        if self.gone:
            raise Gone
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(line)
            return await answer
        finally:
            self._waiting.pop(number, None)

    def _send(self, line: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(line)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                told = json.loads(line)
                waiting = self._waiting.get(told["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(told)
        except (ValueError, TypeError, KeyError):
            self.output.write(b"rlhf: the worker wrote what is no answer: " + line[:300] + b"\n")
        finally:
            self.gone = True
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(Gone())


class Workers:
    """Pool of workers: the one that plays the fewest episodes gets the next."""

    def __init__(self, place: Place, count: int, at_once: int, start_timeout_s: float):
        self.place, self.count, self.at_once, self.start_timeout_s = place, count, at_once, start_timeout_s
        self.workers: list[Worker] = []
        self._locks: list[asyncio.Lock] = []
        self._slots: asyncio.Semaphore | None = None

    def open(self, folder: Path | None) -> None:
        for number in range(self.count):
            name = "verifiers.log" if number == 0 else f"verifiers-{number}.log"
            output = (folder / name).open("a+b") if folder is not None else tempfile.TemporaryFile()  # noqa: SIM115
            self.workers.append(Worker(self.place, output))
            self._locks.append(asyncio.Lock())
        self._slots = asyncio.Semaphore(self.count * self.at_once)

    async def ready(self, number: int = 0) -> None:
        async with self._locks[number]:
            if self.workers[number].gone:
                await self.workers[number].start(self.start_timeout_s)

    async def play(self, timeout_s: float, **request: Any) -> dict[str, Any]:
        """Returns the environment's result of an episode. Raises ``EpisodeFailed``."""
        if self._slots is None:
            self.open(None)
        assert self._slots is not None
        async with self._slots:
            number = min(range(self.count), key=lambda number: self.workers[number].episodes)
            worker = self.workers[number]
            worker.episodes += 1
            try:
                await self.ready(number)
                told = await worker.play(timeout_s, **request)
            except Gone as error:
                raise EpisodeFailed(f"the worker died{worker.last_lines()}", retryable=True) from error
            except TimeoutError as error:
                reason = f"no answer of the environment in {timeout_s:g} s ({self.place.option}.timeout-s)"
                raise EpisodeFailed(reason, retryable=True) from error
            finally:
                worker.episodes -= 1
        if "error" in told:
            raise EpisodeFailed(f"{told['error']['type']}: {told['error']['message']}", retryable=True)
        answer: dict[str, Any] = told["ok"]
        return answer

    async def close(self) -> None:
        for worker in self.workers:
            await worker.end()
            worker.output.close()
        self.workers, self._locks, self._slots = [], [], None


def _line(**values: Any) -> bytes:
    return json.dumps(values, default=str).encode() + b"\n"
