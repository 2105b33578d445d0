"""A machine of a service as a sandbox: commands are started in it, files go in as archives."""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import secrets
import shlex
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rlhf_plugin_shell.container import CLEARED, EMPTIED, EMPTY, STATE, archive, command_script, encoded_command
from rlhf_plugin_shell.sandboxes import File, Ran, ShellLimits
from rlhf_plugin_shell.service import Result, ServiceFailed, failed, is_one_of, tried

START_S = 30.0
"""Seconds until a command runs, which do not count."""
OWN_S = 60.0
"""Seconds for a script of this module, such as unpacking files."""
ROOT = "root"
NOWHERE = "/nonexistent"
"""Home in which the service's login shell looks for its settings: the policy wrote those of its own home."""
THREADS = 64
"""Threads and processes that a user may have beyond ``processes``."""
KILLED, CANNOT_RUN = 128 + 9, 126
"""Exit codes of what was killed, and of what could not be started."""
PROCESSES = "; ".join(
    (
        'for each in /proc/[0-9]*/stat; do { read -r line < "$each"; } 2>&- || continue',
        "pid=${line%% *}",
        "set -- ${line##*) }",
        "[[ $1 == [ZX] ]] && continue",
        "(($7 & 0x200000)) && continue",
        "((pid == $$ || pid == PPID)) && continue",
        '[[ $known == *" $pid:${20} "* ]] || found+=" $pid:${20}"',
        "done",
    )
)
"""Finds processes that are not in ``known``, by their number and begin, but for threads of the kernel (``PF_KTHREAD``). It uses
nothing but ``bash``: commands may have removed the rest."""
LOOK = f'id -u -- "$name" && id -g -- "$name" || exit 1; known= found=; {PROCESSES}; echo "$found"'
SWEEP = "; ".join(
    (
        f"for pass in {{1..100}}; do found=; {PROCESSES}",
        "[[ -n $found ]] || break",
        'for signal in STOP KILL; do for each in $found; do builtin kill -$signal "${each%%:*}" 2>&-; done; done',
        "done",
    )
)
"""Ends all processes that were not there at the beginning."""
SWEPT = f"{SWEEP}; [[ -z $found ]]"
UNPACK = """[ -d "$folder" ] || { mkdir -p -- "$folder" && chown -- "$owner" "$folder"; }
tar -xpf "$packed" --same-owner -C "$folder"
code=$?
rm -f -- "$packed"
exit $code
"""
SAME_USER = 'for each in sudo su doas pkexec; do each=$(command -v "$each") && chmod -- u-s,g-s "$each"; done; true'
"""Commands stay those of their user: root could end the machine, and a bad episode with it."""
RUN = (
    "script=$rlhf_script command=$rlhf_command; HOME=$rlhf_home; unset rlhf_script rlhf_command rlhf_home;"
    ' exec /bin/bash --norc --noprofile -c "$script" bash "" "$command" {folder} {state}'
)


class Machine:
    """A running machine.

    Args:
        box: as the service's client has it.
        user: name of the user of commands.
        folder: the working folder; empty: that of the template.
        home: home of commands; empty: their user's.
        clean: tests have an empty home and an empty ``/tmp``.
        tries: calls of the service until one has failed.
        end: ends the machine.
    """

    def __init__(
        self,
        box: Any,
        limits: ShellLimits,
        user: str,
        folder: str,
        *,
        home: str,
        clean: bool,
        tries: int,
        end: Callable[[], Awaitable[None]],
    ):
        self.box, self.limits, self.user, self.folder = box, limits, user, folder
        self.home, self.clean, self.tries = home, clean, tries
        self._ids = (0, 0)
        self._end: Callable[[], Awaitable[None]] | None = end
        self._known = " "
        """Processes that are the machine's own."""
        self._broken = ""
        """What failed because commands removed the machine's programs, if they did: whoever is root may."""
        self._begun = False
        self._settled = True
        self._turn = asyncio.Lock()

    async def begin(self) -> None:
        """Looks at the new machine, and makes the working folder. Raises ``ServiceFailed``."""
        try:
            user, group, *found = (await self._own(LOOK, name=self.user)).split()
            self._ids = (int(user), int(group))
        except (ServiceFailed, ValueError) as failure:
            if isinstance(failure, ServiceFailed) and not failure.answered:
                raise
            raise ServiceFailed(f"the machine has no user {self.user!r}, or no bash") from None
        self._known = f" {' '.join(found)} "
        self.folder = self.folder or (await self._own("pwd", self.user, where=None)).strip()
        self.home = self.home or await self._own("printf %s ~", self.user)
        if self._ids[0] != 0:
            await self._own(SAME_USER)
        await self.put({})
        self._begun = True

    async def put(self, files: Mapping[str, File], into: str = "work") -> None:
        for name in files:
            if not name or any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
                raise ValueError(f"a file {name!r} cannot be made: give a path below the folder, such as src/main.py")
        if into == "work":
            await self._unpack(self.folder, archive("", files, owner=self._ids), self._ids)
        else:
            await self._settle()
            await self._unpack(f"/{into}", archive("", files))

    async def logs(self, folders: Sequence[str] = ()) -> None:
        await self._settle()
        await self._own("rm -rf -- /logs")
        await self._unpack("/logs", archive("", {}, folders, owner=self._ids), self._ids)

    async def read(self, path: str, most: int = 1 << 16) -> bytes | None:
        top, _, rest = path.partition("/")
        where = posixpath.join(self.folder if top == "work" else f"/{top}", rest)

        async def beginning() -> bytes | None:
            try:
                about = await self.box.files.get_info(where, user=ROOT)
                if about.symlink_target or about.type is None or about.type.value != "file":
                    return None
                stream = await self.box.files.read(where, format="stream", user=ROOT)
            except Exception as error:
                if is_one_of(error, ("FileNotFoundException",)):
                    return None
                raise
            content = bytearray()
            async with contextlib.aclosing(stream) as parts:
                async for part in parts:
                    content += part
                    if len(content) >= most:
                        break
            return bytes(content[:most])

        return await tried(f"reading {where}", beginning, self.tries)

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
        if fresh:
            await self._settle()
        given = {f"{name.upper()}_DIR": f"/{name}" for name in sees} | {"TMPDIR": "/tmp"} | dict(variables or {})
        home = EMPTY if fresh and self.clean else given.get("HOME", self.home)
        script = command_script(self._limiting(), f"known='{self._known}'; {SWEEP.replace('{1..100}', '1 2')}")
        given |= {"HOME": NOWHERE, "rlhf_home": home, "rlhf_command": encoded.decode(), "rlhf_script": script}
        async with self._turn:
            self._settled = fresh
            if self._broken:
                return Ran("ended", CANNOT_RUN, f"{self._broken}\n", 0.0)
            return await self._execute(given, seconds, "" if fresh else STATE)

    async def close(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            await asyncio.shield(asyncio.ensure_future(end()))

    def _limiting(self) -> str:
        most = {"c": 0, "t": self.limits.cpu_s, "f": max(1, self.limits.file >> 10), "u": self.limits.processes + THREADS}
        return "; ".join(f"ulimit -{name} {value} 2>&-" for name, value in most.items())  # root has no limit of processes

    async def _execute(self, variables: Mapping[str, str], seconds: float, state: str) -> Ran:
        output = Output(self.limits.output)
        line = RUN.format(folder=shlex.quote(self.folder), state=shlex.quote(state))

        async def start() -> Any:
            return await self.box.commands.run(
                line,
                background=True,
                envs=dict(variables),
                user=self.user,
                cwd="/",
                timeout=seconds + START_S,
                request_timeout=START_S,
                on_stdout=output.add,
                retain_output=False,
            )

        try:
            handle = await tried("starting a command", start, self.tries, repeatable=False)
        except ServiceFailed as failure:
            if failure.answered:  # the machine works: earlier commands are the reason
                return Ran("ended", CANNOT_RUN, f"{failure}\n", 0.0)
            raise
        began = time.monotonic()
        waits, full = asyncio.ensure_future(handle.wait()), asyncio.ensure_future(output.full.wait())
        try:
            await asyncio.wait([waits, full], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            took = time.monotonic() - began
            why, code = ("output", None) if output.full.is_set() else ("late", None)
            if waits.done() and not output.full.is_set():
                why, code = "ended", await _code(waits)
        finally:
            waits.cancel()
            full.cancel()
            await handle.disconnect()
        await self._own(SWEPT, known=self._known)
        return Ran(why, code, output.text, took)  # type: ignore[arg-type]

    async def _settle(self) -> None:
        """Ends all that earlier commands started, and removes what they left where tests are."""
        if self._settled:
            return
        await self._own(SWEPT, known=self._known)
        await self._own(f"{CLEARED}{EMPTIED if self.clean else ''}; true")
        self._settled = True

    async def _unpack(self, folder: str, packed: bytes, owner: tuple[int, int] = (0, 0)) -> None:
        place = f"/tmp/.rlhf-{secrets.token_hex(8)}.tar"

        async def unpacked() -> None:
            await self.box.files.write(place, packed, user=ROOT)
            envs = {"folder": folder, "packed": place, "owner": f"{owner[0]}:{owner[1]}"}
            await self.box.commands.run(UNPACK, envs=envs, user=ROOT, cwd="/", timeout=OWN_S, request_timeout=START_S)

        await self._or_broken(tried(f"writing files to {folder}", unpacked, self.tries))

    async def _own(self, script: str, user: str = ROOT, where: str | None = "/", **variables: str) -> str:
        """Returns what a script of this module wrote; it may be run again. Raises ``ServiceFailed``."""

        async def ran() -> str:
            result = await self.box.commands.run(
                script, envs=variables, user=user, cwd=where, timeout=OWN_S, request_timeout=START_S
            )
            return str(result.stdout)

        return await self._or_broken(tried("looking after the machine", ran, self.tries)) or ""

    async def _or_broken(self, calling: Awaitable[Result]) -> Result | None:
        """Returns the result of a script, or ``None`` if commands are the reason that it fails: no later one runs then, and no
        tests. Raises ``ServiceFailed``.
        """
        try:
            return await calling
        except ServiceFailed as failure:
            if not (failure.exited and self._begun):
                raise
            self._broken = str(failure)
            return None


class Output:
    """The output of a command, up to a limit."""

    def __init__(self, most: int):
        self._most, self._size, self._parts = most, 0, list[str]()
        self.full = asyncio.Event()

    def add(self, part: str) -> None:
        room = self._most - self._size
        self._parts.append(part[: max(0, room)])
        self._size += len(part)
        if self._size > self._most:
            self.full.set()

    @property
    def text(self) -> str:
        return "".join(self._parts)


async def _code(waits: asyncio.Future[Any]) -> int:
    """Returns the exit code of a command that has ended. Raises ``ServiceFailed`` if its machine was lost."""
    try:
        code = (await waits).exit_code
    except Exception as error:
        if not is_one_of(error, ("CommandExitException",)):
            raise failed("a command was lost", error) from None
        code = error.exit_code  # type: ignore[attr-defined]
    return int(code) if code >= 0 else KILLED
