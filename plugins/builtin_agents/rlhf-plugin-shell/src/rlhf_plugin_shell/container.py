"""A container as a sandbox: commands are executed in it, files go in and out as archives."""

from __future__ import annotations

import asyncio
import contextlib
import io
import posixpath
import re
import secrets
import tarfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from rlhf_plugin_code_exec.shells import LONGEST_COMMAND

from rlhf_plugin_shell.docker_command import CallFailed, DockerCommand
from rlhf_plugin_shell.sandboxes import File, Ran, SandboxFailed, ShellLimits

STAYS = "exec 3<> <(:) && while :; do (read -r -t 3600 -u 3) & wait; done"
"""The container's first process, for ``bash``: it collects what ended, and only the container's end ends it. It waits without any
program of the container: a command that removed ``sleep`` would make it a loop without rest."""
STATE = "/tmp/.shell-state"
"""File with what one command has of those before it."""
START_S = 30.0
"""Seconds until a command runs, which do not count."""
EMPTY = "/tmp/home"
"""Home of tests."""
CLEARED = "rm -rf -- /tests /logs"
EMPTIED = f"; rm -rf -- /tmp/..?* /tmp/.[!.]* /tmp/*; mkdir -m 0777 -- {EMPTY}"
NO_FILE = re.compile("not find|not be found|no such file", re.IGNORECASE)
CHECKED_S = 1.0
"""Seconds between two looks at the size of a container, while a command runs."""


def encoded_command(command: str) -> bytes:
    """Returns a command as a sandbox takes it. Raises ``ValueError`` for one that is too long or has a zero byte."""
    encoded = command.encode("utf-8", "replace")
    if len(encoded) > LONGEST_COMMAND or b"\0" in encoded:
        raise ValueError(f"a command has at most {LONGEST_COMMAND} bytes, and no zero byte")
    return encoded


def command_script(begins: str, ends: str) -> str:
    """Returns a script that runs ``$2`` in the folder ``$3`` in the state ``$4``; in one line, so that messages of ``bash`` count
    the command's own lines.

    Args:
        begins: is run before the command.
        ends: is run after it, and ends the processes that it left.
    """
    return "; ".join(
        (
            "exec 2>&1 </dev/null",
            "__rlhf_end() { local code=$?; trap - EXIT",
            '[ -z "$__rlhf_state" ] || { printf \'cd -- %q\\n\' "$PWD"; export -p; declare -f; } > "$__rlhf_state" 2>&-',
            ends,
            "exit $code; }",
            begins,
            "__rlhf_command=$2; __rlhf_state=$4",
            'cd -- "$3" 2>&- || { mkdir -p -- "$3" && cd -- "$3"; }',
            'if [ -n "$__rlhf_state" ] && [ -r "$__rlhf_state" ]; then . "$__rlhf_state" >&- 2>&-; fi',
            "__rlhf_state=$4",
            "set --",
            "trap __rlhf_end EXIT",
            'eval "$__rlhf_command"',
        )
    )


COMMAND = command_script("builtin kill -9 -1 2>&-; printf '%s\\n' \"$1\"", "builtin kill -9 -1 2>&-")
"""A command of a container, after a line with ``$1``. At its beginning and end all other processes are killed: the first one of a
container cannot be."""


@dataclass(frozen=True, slots=True)
class Paths:
    """Folders in the container, and users."""

    work: str
    home: str = ""
    """Home of commands; empty: the image's."""
    user: str = ""
    """User of commands; empty: the image's."""
    clean: bool = True
    """True if tests have an empty home and an empty ``/tmp``."""


class Container:
    """A running container.

    Args:
        id: as the command names it.
        remove: removes the container, and all that came with it.
    """

    def __init__(
        self, docker: DockerCommand, id: str, paths: Paths, limits: ShellLimits, remove: Callable[[], Awaitable[None]]
    ):
        self.docker, self.id, self.paths, self.limits = docker, id, paths, limits
        self._remove: Callable[[], Awaitable[None]] | None = remove
        self._settled = True
        self._size = 0
        self._turn = asyncio.Lock()

    async def put(self, files: Mapping[str, File], into: str = "work") -> None:
        for name in files:
            if not name or any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
                raise ValueError(f"a file {name!r} cannot be made: give a path below the folder, such as src/main.py")
        if into != "work":
            await self._settle()
        folder = self.paths.work if into == "work" else f"/{into}"
        await self._copy_in(archive(folder, files, writable=bool(self.paths.user) and into == "work"))

    async def logs(self, folders: Sequence[str] = ()) -> None:
        await self._settle()
        await self._copy_in(archive("/logs", {}, folders, writable=bool(self.paths.user)))

    async def read(self, path: str, most: int = 1 << 16) -> bytes | None:
        top, _, rest = path.partition("/")
        where = posixpath.join(self.paths.work if top == "work" else f"/{top}", rest)
        try:
            packed = await self.docker.read("cp", f"{self.id}:{where}", "-", most=most + (1 << 14))
        except CallFailed as failure:
            if NO_FILE.search(str(failure)):
                return None
            raise SandboxFailed(str(failure)) from failure
        return only_file(packed, most)

    async def run(
        self,
        command: str,
        seconds: float,
        *,
        fresh: bool = False,
        sees: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> Ran:
        encoded = encoded_command(command)
        if self._size >= 2 * self.limits.disk:
            return Ran("disk", None, "", 0.0)
        if fresh:
            await self._settle()
        given = {f"{name.upper()}_DIR": f"/{name}" for name in sees} | dict(variables or {})
        if self.paths.home:
            given = {"HOME": self.paths.home, "TMPDIR": "/tmp"} | given
        if fresh and self.paths.clean:
            given["HOME"] = EMPTY
        async with self._turn:
            self._settled = fresh
            ran = await self._execute(encoded.decode(), seconds, given, "" if fresh else STATE)
        return ran

    async def close(self) -> None:
        remove, self._remove = self._remove, None
        if remove is not None:
            with contextlib.suppress(CallFailed):  # what is left goes with the run
                await asyncio.shield(asyncio.ensure_future(remove()))

    async def _execute(self, command: str, seconds: float, variables: Mapping[str, str], state: str) -> Ran:
        marker = secrets.token_hex(16)
        user = ("--user", self.paths.user) if self.paths.user else ()
        given = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
        shell = ("bash", "--norc", "--noprofile", "-c", COMMAND, "bash", marker, command, self.paths.work, state)
        watched = asyncio.create_task(self._too_large())
        began = time.monotonic()
        try:
            async with self.docker.started("exec", *user, "--workdir", "/", *given, self.id, *shell) as process:
                why, output, seconds_run = await self._followed(process, f"{marker}\n".encode(), seconds, watched)
                if why == "ended":
                    code = await process.wait()
                else:
                    error = await _rest(process) if why == "none" else ""
                    await self._restart()
        finally:
            watched.cancel()
            with contextlib.suppress(asyncio.CancelledError, SandboxFailed):
                await watched
        if why == "none":
            # The container works: earlier commands are the reason. They removed programs, or left no room for a process.
            return Ran("ended", 126, error or output.decode("utf-8", "replace"), time.monotonic() - began)
        if state and await self._measure() > self.limits.disk and why == "ended":
            why = "disk"
        text = output.decode("utf-8", "replace")
        return Ran(why, code if why == "ended" else None, text, seconds_run)  # type: ignore[arg-type]

    async def _followed(
        self, process: asyncio.subprocess.Process, marker: bytes, seconds: float, watched: asyncio.Task[None]
    ) -> tuple[str, bytes, float]:
        """Returns why a command ended, its output and its seconds; ``none``: it never began."""
        assert process.stdout is not None
        output = bytearray()
        began, deadline = 0.0, time.monotonic() + START_S
        reads: asyncio.Task[bytes] = asyncio.create_task(process.stdout.read(1 << 16))
        try:
            while True:
                await asyncio.wait(
                    [reads, watched], timeout=max(0.0, deadline - time.monotonic()), return_when=asyncio.FIRST_COMPLETED
                )
                now = time.monotonic()
                if reads.done():
                    part = reads.result()
                    if not part:
                        return ("ended" if began else "none"), bytes(output), now - began
                    output += part
                    if not began and len(output) >= len(marker):
                        if not output.startswith(marker):
                            return "none", bytes(output), 0.0
                        del output[: len(marker)]
                        began, deadline = now, now + seconds
                    if len(output) > self.limits.output:
                        return "output", bytes(output[: self.limits.output]), now - began
                    reads = asyncio.create_task(process.stdout.read(1 << 16))
                elif began and watched.done():
                    return "disk", bytes(output), now - began
                if now >= deadline:
                    return ("late" if began else "none"), bytes(output), now - began
        finally:
            reads.cancel()

    async def _settle(self) -> None:
        """Ends all that earlier commands started, whatever they did to the programs of the container, and removes what they left
        where tests are.
        """
        if self._settled:
            return
        await self._restart()
        script = CLEARED + (EMPTIED if self.paths.clean else "")
        with contextlib.suppress(CallFailed):  # a command removed these programs: tests fail, too
            await self.docker.call("exec", "--user", "0", "--workdir", "/", self.id, "sh", "-c", script)
        self._settled = True

    async def _restart(self) -> None:
        await self.docker.call("restart", "-t", "0", self.id)

    async def _copy_in(self, packed: bytes) -> None:
        await self.docker.call("cp", "-", f"{self.id}:/", stdin=packed)

    async def _measure(self) -> int:
        """Returns the bytes of all files that are not the image's."""
        told = await self.docker.call("inspect", "--size", "--format", "{{.SizeRw}}", self.id)
        self._size = int(told) if told.isdigit() else 0
        return self._size

    async def _too_large(self) -> None:
        """Ends when the files are too large, and more than they were."""
        most = max(self.limits.disk, self._size)
        while True:
            await asyncio.sleep(CHECKED_S)
            if await self._measure() > most:
                return


def archive(
    folder: str,
    files: Mapping[str, File],
    folders: Sequence[str] = (),
    writable: bool = False,
    owner: tuple[int, int] = (0, 0),
) -> bytes:
    """Returns an archive with files at absolute paths below a folder, or at relative ones if that is empty.

    Args:
        folders: are there, too.
        writable: for all users.
        owner: numbers of the user and the group.
    """
    made = io.BytesIO()
    more = 0o022 if writable else 0
    seen: set[str] = set()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as packed:

        def owned(path: str) -> tarfile.TarInfo:
            entry = tarfile.TarInfo(path)
            entry.uid, entry.gid = owner
            return entry

        def add_folder(path: str) -> None:
            if path in seen or not path:
                return
            add_folder(posixpath.dirname(path))
            seen.add(path)
            entry = owned(path)
            entry.type, entry.mode, entry.mtime = tarfile.DIRTYPE, 0o755 | more, int(time.time())
            packed.addfile(entry)

        add_folder(folder.strip("/"))
        for name in folders:
            add_folder(posixpath.join(folder, name).strip("/"))
        for name, file in files.items():
            path = posixpath.join(folder, name).strip("/")
            add_folder(posixpath.dirname(path))
            entry = owned(path)
            entry.size, entry.mtime = len(file.content), int(time.time())
            entry.mode = (0o755 if file.runs else 0o644) | more
            packed.addfile(entry, io.BytesIO(file.content))
    return made.getvalue()


def only_file(packed: bytes, most: int) -> bytes | None:
    """Returns the beginning of the file in an archive, which may be cut; ``None`` if it is no file."""
    try:
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r|") as opened:
            entry = opened.next()
            if entry is None or not entry.isreg():
                return None
            file = opened.extractfile(entry)
            if file is None:
                return None
            begins = entry.offset_data
            return packed[begins : begins + min(entry.size, most)]
    except tarfile.TarError:
        return None


async def _rest(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    try:
        async with asyncio.timeout(5):
            return (await process.stderr.read(4000)).decode("utf-8", "replace").strip()
    except TimeoutError:
        return ""
