"""The agent ``harness``: a program plays the episode; its commands run in the sandbox."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from rlhf_host import AgentNeeds, Episode, EpisodeFailed, Picture, Policy, UserError, hookimpl
from rlhf_host.installed import install_line
from rlhf_plugin_shell.outputs import ENDED, shortened
from rlhf_plugin_shell.sandboxed import LOGGED, SandboxAgent, SandboxOptions
from rlhf_plugin_shell.sandboxes import Ran, Sandbox, SandboxFailed
from rlhf_plugin_shell.work import COLUMNS, DIRECTORY, Work

KEPT = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Environment variables that are passed on: a program gets no keys of yours."""
SOCKET = "RLHF_SHELL"
"""Environment variable with the path of the socket that takes commands."""
LONGEST_LINE = 1 << 20
"""Bytes of a command with its JSON."""
LONGEST_PLACE = 80
"""Characters of the path of a folder that leave room for a socket in a folder in it: a socket's path has at most 107."""
NOT_ENDED = -1
"""``returncode`` of a command that was ended."""


class HarnessAgent(SandboxAgent):
    """A program, such as a coding agent, asks the policy by OpenAI's API and has its commands run in a sandbox; the tests of the
    task's row give the reward.
    """

    COUNTS = ("calls", "commands", "failed", "late")

    class Options(SandboxOptions):
        command: str | list[str] = Field(
            min_length=1,
            description="the program and its arguments, a text or a list; {task_file} is a JSON file with the task, {python} this"
            " interpreter",
        )
        env: list[str] = Field([], description="names of environment variables to pass on")

    options: HarnessAgent.Options

    def __init__(self, options: Options):
        super().__init__(options)
        try:
            self.command = shlex.split(options.command) if isinstance(options.command, str) else options.command
        except ValueError as error:
            raise UserError(f"harness: agent.command {options.command!r}: {error}") from error
        if not self.command:
            raise UserError("harness: agent.command is empty")
        if importlib.util.find_spec("rlhf_plugin_openai_agent") is None:
            raise UserError(f"harness: programs need another package: {install_line('rlhf-plugin-openai-agent')}")

    @hookimpl
    def needs(self) -> AgentNeeds:
        return AgentNeeds(rewards=not self.options.rewards, episodes_at_once=self.options.at_once, server=True)

    async def play(self, episode: Episode, policy: Policy, shell: Sandbox, work: Work) -> tuple[Counter[str], str | None]:
        from rlhf_plugin_openai_agent.process import run

        endpoint = await policy.endpoint()
        commands = Commands(episode, shell, work, self.options.timeout_s)
        place = None if len(tempfile.gettempdir()) < LONGEST_PLACE else "/tmp"
        with tempfile.TemporaryDirectory(prefix="rlhf-harness-", dir=place) as folder:
            file, socket = Path(folder, "task.json"), Path(folder, "shell")
            task = {"prompt": episode.task.prompt, "metadata": _metadata(episode), "seed": episode.seed, "split": episode.split}
            file.write_text(json.dumps(task, ensure_ascii=False, default=_plain), encoding="utf-8")
            server = await asyncio.start_unix_server(commands.serve, socket, limit=LONGEST_LINE)
            try:
                places = {"{task_file}": str(file), "{python}": sys.executable}
                command = [_replaced(part, places) for part in self.command]
                program = asyncio.ensure_future(run(command, Path.cwd(), self._environment(endpoint, folder, file, socket)))
                await _first(program, commands.failure)
                ended = await program
                await commands.finished()
            finally:
                server.close()
                commands.close()
        episode.log("program", code=ended.code, stdout=ended.stdout[-LOGGED:], stderr=ended.stderr[-LOGGED:])
        if endpoint.failed is not None:
            reason, retryable = endpoint.failed
            raise EpisodeFailed(reason, retryable)
        if ended.code != 0:
            raise EpisodeFailed(f"the program ended with exit code {ended.code}: {ended.last_words}")
        if endpoint.calls == 0:
            raise EpisodeFailed("the program never asked the policy, or each of its requests was refused")
        return commands.counts + Counter(calls=endpoint.calls), endpoint.final

    def _environment(self, endpoint: Any, folder: str, file: Path, socket: Path) -> dict[str, str]:
        named = {name: os.environ[name] for name in (*KEPT, *self.options.env) if name in os.environ}
        own = {"HOME": folder, "TMPDIR": folder, "RLHF_TASK_FILE": str(file), SOCKET: str(socket)}
        own |= {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": endpoint.api_key, "OPENAI_MODEL": "policy"}
        own |= {"ANTHROPIC_BASE_URL": endpoint.base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": endpoint.api_key}
        return named | own


class Commands:
    """Commands of a program, by a socket: a line of JSON with ``command``, and ``timeout`` in seconds if it is to be shorter than
    the run's. The answer is a line with ``returncode`` and ``output``, and ``ended`` for a command that was ended; or with
    ``error``, for a request that cannot be read. A connection may have several.
    """

    def __init__(self, episode: Episode, shell: Sandbox, work: Work, seconds: float):
        self.counts: Counter[str] = Counter()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Has the exception of a sandbox that failed."""
        self._episode, self._shell, self._work, self._seconds = episode, shell, work, seconds
        self._left = work.seconds or float("inf")
        self._turn, self._over = asyncio.Lock(), False
        self._serving: set[asyncio.Task[Any]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            while True:
                line = await _line(reader)
                told = {"error": f"a line has at most {LONGEST_LINE} bytes"} if line is None else await self._answer(line)
                writer.write(json.dumps(told).encode() + b"\n")
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the program has gone, or the episode is over
        finally:
            self._serving.discard(task)
            writer.close()

    async def finished(self) -> None:
        """Takes no further command, and waits for the one that runs: from now on the sandbox is the tests'. Raises
        ``SandboxFailed`` if the sandbox has failed.
        """
        self._over = True
        async with self._turn:
            if self.failure.done():
                await self.failure

    def close(self) -> None:
        """Ends the connections. A command that runs is ended, and its sandbox with it."""
        for task in list(self._serving):
            task.cancel()
        if self.failure.done() and not self.failure.cancelled():
            self.failure.exception()  # it was raised, or is not asked for any more
        self.failure.cancel()

    async def _answer(self, line: bytes) -> Mapping[str, Any]:
        try:
            asked = json.loads(line)
            command, seconds = asked["command"], float(asked.get("timeout") or self._seconds)
            if not isinstance(command, str) or not seconds > 0:
                raise ValueError(f"command {command!r:.40}, timeout {seconds}")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            return {"error": f'{error}: give {{"command": TEXT, "timeout": SECONDS}}, in one line'}
        async with self._turn:
            if self._over:
                return {"error": "the program has ended"}
            seconds = min(seconds, self._seconds, self._left)
            if seconds <= 0:
                return {"returncode": NOT_ENDED, "output": "", "ended": "not run: the time for this task is over"}
            began = time.monotonic()
            try:
                ran = await self._shell.run(command, seconds, variables=self._work.variables)
            except ValueError as error:
                return {"error": str(error)}
            except SandboxFailed as failure:
                if not self.failure.done():
                    self.failure.set_exception(failure)
                return {"error": "the sandbox failed; the episode is over"}
            self._left -= time.monotonic() - began
        return self._told(command, ran, seconds)

    def _told(self, command: str, ran: Ran, seconds: float) -> Mapping[str, Any]:
        self.counts["commands"] += 1
        self.counts["late"] += ran.why == "late"
        self.counts["failed"] += ran.code != 0
        output = shortened(ran.output, LOGGED)
        self._episode.log("shell", command=shortened(command, LOGGED), code=ran.code, output=output, s=round(ran.seconds, 4))
        if ran.why == "ended":
            return {"returncode": ran.code, "output": ran.output}
        why = f"it took longer than {seconds:g} s" if ran.why == "late" else ENDED[ran.why]
        return {"returncode": NOT_ENDED, "output": ran.output, "ended": why}


async def _line(reader: asyncio.StreamReader) -> bytes | None:
    """Returns the next line, or ``None`` for one that is too long. Raises ``IncompleteReadError`` at the end."""
    too_long = False
    while True:
        try:
            line = await reader.readuntil(b"\n")
            return None if too_long else line
        except asyncio.LimitOverrunError as error:
            too_long = True
            await reader.readexactly(error.consumed)


async def _first(program: asyncio.Future[Any], failure: asyncio.Future[None]) -> None:
    """Waits for the program, and ends it if the sandbox fails, whose exception is raised then, or if this is cancelled."""
    try:
        await asyncio.wait([program, failure], return_when=asyncio.FIRST_COMPLETED)
        if failure.done():
            await failure
    except BaseException:
        program.cancel()
        await asyncio.gather(program, return_exceptions=True)
        raise


def _metadata(episode: Episode) -> dict[str, Any]:
    """Returns the columns of a task, without those of its tests and files."""
    return {name: value for name, value in episode.task.metadata.items() if name not in (*COLUMNS, DIRECTORY)}


def _plain(value: object) -> str:
    """Returns a picture as its address, and anything else that JSON has not as a text."""
    return value.uri() if isinstance(value, Picture) else str(value)


def _replaced(part: str, places: Mapping[str, str]) -> str:
    for place, value in places.items():
        part = part.replace(place, value)
    return part
