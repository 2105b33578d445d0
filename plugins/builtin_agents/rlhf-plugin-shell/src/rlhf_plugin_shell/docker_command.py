"""Calls of the command ``docker``, or of another that understands the same command line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass

from rlhf_plugin_shell.sandboxes import SandboxFailed

CALL_S = 60.0
"""Seconds for a call that waits for nothing but the daemon."""
STOP_S = 5.0
"""Seconds until the end of a command that was killed is no longer waited for."""
MOST_ERROR = 600
"""Most characters of an error that a message shows."""
MOST_OUT = 16 << 20
PASSED_ON = ("PATH", "HOME", "USER", "LANG", "TMPDIR", "SSH_AUTH_SOCK", "DBUS_SESSION_BUS_ADDRESS")
"""Environment variables that the command gets, so that no others can reach a container by it."""
PASSED_ON_PREFIXES = (
    "DOCKER_",
    "CONTAINER",
    "PODMAN_",
    "BUILDKIT_",
    "BUILDX_",
    "XDG_",
    "LC_",
    "HTTP",
    "http",
    "NO_PROXY",
    "no_proxy",
)


class CallFailed(SandboxFailed):
    """A call of the command failed; the text is what it wrote."""


@dataclass(frozen=True, slots=True)
class DockerCommand:
    """The command, as it is called."""

    path: str

    async def call(self, *arguments: str, seconds: float = CALL_S, stdin: bytes = b"") -> str:
        """Returns what the command wrote. Raises ``CallFailed`` with its error."""
        return (await self.read(*arguments, seconds=seconds, stdin=stdin)).decode("utf-8", "replace").strip()

    async def read(self, *arguments: str, seconds: float = CALL_S, stdin: bytes = b"", most: int = MOST_OUT) -> bytes:
        """Returns the beginning of what the command wrote, at most ``most`` bytes. Raises ``CallFailed`` with its error."""
        async with self.started(*arguments, stdin=bool(stdin)) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            try:
                async with asyncio.timeout(seconds):
                    errors = asyncio.create_task(process.stderr.read(1 << 20))
                    try:
                        writes = asyncio.create_task(_write(process, stdin))
                        out = await _beginning(process.stdout, most)
                        if len(out) >= most:
                            return out
                        await writes
                        error = await errors
                        code = await process.wait()
                    finally:
                        errors.cancel()
                        writes.cancel()
            except TimeoutError:
                raise CallFailed(f"{self._named(arguments)} did not end in {seconds:g} s") from None
        if code != 0:
            text = " ".join(error.decode("utf-8", "replace").split()) or f"exit code {code}"
            raise CallFailed(f"{self._named(arguments)}: {text[-MOST_ERROR:]}")
        return out

    @contextlib.asynccontextmanager
    async def started(self, *arguments: str, stdin: bool = False) -> AsyncIterator[asyncio.subprocess.Process]:
        """The running command, which is killed if it is still there in the end. Raises ``CallFailed``."""
        try:
            process = await asyncio.create_subprocess_exec(
                *(self.path, *arguments),
                stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=passed_on(),
                start_new_session=True,
            )
        except OSError as error:
            raise CallFailed(f"{self.path}: {error}") from error
        try:
            yield process
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                with contextlib.suppress(TimeoutError):  # something else may hold its pipes, for whose end asyncio waits, too
                    async with asyncio.timeout(STOP_S):
                        await process.wait()
            process._transport.close()  # type: ignore[attr-defined]  # what was not read keeps its pipes open

    def _named(self, arguments: tuple[str, ...]) -> str:
        words = [arguments[0], *(arguments[1:2] if arguments[0] in ("image", "network", "volume", "compose") else ())]
        return " ".join((os.path.basename(self.path), *words))


def docker_command(name: str) -> DockerCommand | None:
    """Returns the command of this name or path; ``None`` if it is not installed."""
    path = shutil.which(name)
    return None if path is None else DockerCommand(path)


def passed_on() -> dict[str, str]:
    """Returns the environment variables of this process that the command gets."""
    return {name: value for name, value in os.environ.items() if name in PASSED_ON or name.startswith(PASSED_ON_PREFIXES)}


async def _write(process: asyncio.subprocess.Process, content: bytes) -> None:
    if process.stdin is None:
        return
    with contextlib.suppress(OSError):  # the command has ended: its exit code says why
        process.stdin.write(content)
        await process.stdin.drain()
        process.stdin.close()


async def _beginning(stream: asyncio.StreamReader, most: int) -> bytes:
    content = bytearray()
    while len(content) < most and (part := await stream.read(min(1 << 16, most - len(content)))):
        content += part
    return bytes(content)
