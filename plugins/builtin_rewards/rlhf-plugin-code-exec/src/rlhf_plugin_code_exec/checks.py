"""Tries every attack on this machine, and observes what got out."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rlhf_plugin_code_exec.attacks import ATTACKS, ENDED, QUIET, TRIES, trying
from rlhf_plugin_code_exec.runner import Runner
from rlhf_plugin_code_exec.suites import suite_of

MEMORY, PROCESSES = 512 << 20, 8
"""Limits of the attacks, whatever the limits of programs are."""
PLACE = re.compile(r"\{[\w.]+(!r)?\}")
WANTED = suite_of("", "assert f() is None")


@dataclass(frozen=True, slots=True)
class Outside:
    """Things that programs must not touch."""

    folder: Path
    decoy: subprocess.Popen[bytes]
    port: int

    def filled(self, programs: dict[str, str]) -> dict[str, str]:
        """Returns programs with these places filled in."""
        places = {f"{{{name}!r}}": repr(str(self.folder / name)) for name in ("written", "daemon", "victim", "server", ".")}
        places |= {"{port}": str(self.port), "{pid}": str(self.decoy.pid)}
        return {name: PLACE.sub(lambda found: places.get(found[0], found[0]), code) for name, code in programs.items()}

    def state(self) -> list[str]:
        """Returns each file with the time of its last change, and True if the unused process lives."""
        try:
            files = [f"{path.name}: {path.lstat().st_ctime_ns}" for path in sorted(self.folder.iterdir())]
        except OSError as error:
            files = [f"the folder: {error.strerror}"]
        return [*files, f"the folder: {self.folder.stat().st_ctime_ns}", f"a process: {self.decoy.poll()}"]


@contextmanager
def outside() -> Iterator[Outside]:
    """Creates a folder with a file that all users may change, a server, and a process."""
    folder = Path(tempfile.mkdtemp(prefix="rlhf-outside-"))
    decoy = subprocess.Popen(["sleep", "600"])
    try:
        (folder / "victim").write_text("kept")
        with suppress(OSError):  # not every file system has attributes
            os.setxattr(folder / "victim", "user.kept", b"x")
        with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as local:
            local.bind(str(folder / "server"))
            for path in (folder / "victim", folder / "server", folder):
                path.chmod(0o777)
            yield Outside(folder, decoy, server.getsockname()[1])
    finally:
        decoy.kill()
        decoy.wait()
        with suppress(OSError):
            folder.chmod(0o700)
        shutil.rmtree(folder, ignore_errors=True)


async def escapes(runner: Runner) -> list[str]:
    """Returns the attacks that got something, or were not stopped. Raises ``JailFailed``."""
    with outside() as place:
        before = place.state()
        patient, brief = (runner.within(seconds, MEMORY, PROCESSES) for seconds in (30.0, 2.0))
        tries = place.filled(TRIES | QUIET)
        together, escaped = await asyncio.gather(_out(patient, {"tries": trying(tries)}), _out(brief, place.filled(ATTACKS)))
        if together:
            escaped += together + await _out(patient, {name: trying({name: tries[name]}) for name in TRIES})
        return escaped + [f"a change outside: {each}" for each in place.state() if each not in before]


async def _out(runner: Runner, programs: dict[str, str]) -> list[str]:
    tried = await asyncio.gather(*(attempt(runner, name, code) for name, code in programs.items()))
    return [name for name, _, out in tried if out]


async def attempt(runner: Runner, name: str, code: str) -> tuple[str, float, bool]:
    """Returns name, seconds, and True if it got out. Raises ``JailFailed``."""
    started = time.monotonic()
    told = await runner.tests(code, WANTED)
    verdict = told["results"][0].get("verdict", "")
    passed = '"passed": 1' in verdict
    if name not in ATTACKS:
        out = not passed
    else:
        out = passed if name in ENDED else "AssertionError" in verdict
    return name, time.monotonic() - started, out
