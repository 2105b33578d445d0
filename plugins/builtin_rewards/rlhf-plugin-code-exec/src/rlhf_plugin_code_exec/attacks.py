"""Programs that try to get out. Each is a function ``f`` that returns what it got, or nothing where it was stopped."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_plugin_code_exec.tasks import Calls

if TYPE_CHECKING:
    from rlhf_plugin_code_exec.runner import Runner

_TRY = """
def f():
    try:
        return {}
    except BaseException as error:
        return None
"""
ATTACKS = {
    "reads /etc/passwd": _TRY.format("open('/etc/passwd').read() or None"),
    "reads the environment of process 1": _TRY.format("open('/proc/1/environ').read() or None"),
    "reads its own environment's parent": _TRY.format("open('/proc/%d/environ' % __import__('os').getppid()).read() or None"),
    "lists the file system": _TRY.format("__import__('os').listdir('/') and 'listed'"),
    "writes outside": _TRY.format("open({place!r}, 'w').write('x') and 'wrote'"),
    "writes into /tmp": _TRY.format("open('/tmp/rlhf-escaped-' + str(__import__('os').getpid()), 'w').write('x') and 'wrote'"),
    "opens a socket": _TRY.format("__import__('socket').create_connection(('127.0.0.1', {port}), 1) and 'connected'"),
    "opens a raw UNIX socket": _TRY.format("__import__('socket').socket(1, 1) and 'opened'"),
    "kills what it can": "import os, signal\n" + _TRY.format("os.kill({pid}, 9) or 'killed'"),
    "limits another process": _TRY.format("__import__('resource').prlimit({pid}, 7, (64, 64)) and 'limited'"),
    "signals as a file's owner": _TRY.format("__import__('fcntl').fcntl(1, 8, {pid}) == 0 and 'owned'"),
    "shares memory": """
import ctypes
def f():
    library = ctypes.CDLL(None)
    shared = library.shmget(0, 4096, 0o1600)
    if shared < 0:
        return None
    library.shmctl(shared, 0, None)
    return 'shared'
""",
    "kills everything": _TRY.format("__import__('os').kill(-1, 0) or None"),
    "traces": _TRY.format("__import__('ctypes').CDLL(None).ptrace(16, {pid}, 0, 0) == 0 or None"),
    "makes a namespace": _TRY.format("__import__('ctypes').CDLL(None).unshare(0x10000000) == 0 or None"),
    "becomes root": _TRY.format("__import__('os').setuid(0) or 'root'"),
    "mounts": _TRY.format("__import__('ctypes').CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0 or None"),
    "fills memory": _TRY.format("len(bytearray(4 << 30)) and 'had it'"),
    "fills the disk": _TRY.format("open('big', 'wb').write(bytes(64 << 20)) >= 64 << 20 and 'wrote' or None"),
    "forks without end": """
import os
def f():
    for number in range(200):
        try:
            if os.fork() == 0:
                import time
                time.sleep(60)
                os._exit(0)
        except OSError:
            return None
    return 'forked'
""",
    "leaves a daemon": """
import os, time
def f():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for end in range(64):
                try: os.close(end)
                except OSError: pass
            time.sleep(0.6)
            try: open({daemon!r}, 'w').write('alive')
            except OSError: pass
            time.sleep(60)
        os._exit(0)
    return None
""",
    "ends itself early": "import os\ndef f():\n    os._exit(0)\n",
    "says that it passed": "import os\ndef f():\n    os.write(4, b'{\"passed\": true}')\n    os._exit(0)\n",
    "answers what nobody asked": "import os\nos.write(4, b'{\"ready\": true}\\n' + b'{\"value\": null}\\n' * 9)\nos._exit(0)\n",
    "loops without end": "def f():\n    while True: pass\n",
    "writes without end": "import sys\ndef f():\n    while True: sys.stderr.write('x' * 65536)\n",
}
"""Name → code. The last ones return nothing because they end, or are ended."""
ENDED = ("ends itself early", "says that it passed", "loops without end", "writes without end")
HARMLESS = ("kills everything", "answers what nobody asked")


async def escapes(runner: Runner) -> list[str]:
    """The attacks that got something, or were not stopped."""
    folder = Path(tempfile.mkdtemp(prefix="rlhf-outside-"))
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, _decoy() as decoy:
            places = {
                "{place!r}": repr(str(folder / "written")),
                "{port}": str(server.getsockname()[1]),
                "{pid}": str(decoy.pid),
            }
            places["{daemon!r}"] = repr(str(folder / "daemon"))
            os.chmod(folder, 0o777)
            tried = await asyncio.gather(*(attempt(runner, name, _filled(code, places)) for name, code in ATTACKS.items()))
            if decoy.poll() is not None:
                return ["kills another process"]
        escaped = [name for name, _, out in tried if out]
        escaped += [f"a file outside: {left.name}" for left in folder.iterdir()]
        return escaped
    finally:
        for left in folder.iterdir():
            left.unlink()
        folder.rmdir()


async def attempt(runner: Runner, name: str, code: str) -> tuple[str, float, bool]:
    """Name, seconds, and whether it got out. Raises ``JailFailed``."""
    started = time.monotonic()
    wanted = Calls("", "assert f() is None", ["f"])
    told = await runner.tests(code, wanted)
    result = told["results"][0]
    passed = '"passed": true' in result.get("verdict", "")
    out = passed if name in ENDED else not passed and name not in HARMLESS and "AssertionError" in result.get("verdict", "")
    return name, time.monotonic() - started, out


@contextmanager
def _decoy() -> Iterator[subprocess.Popen[bytes]]:
    """A process that nobody misses."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _filled(code: str, places: dict[str, str]) -> str:
    for place, value in places.items():
        code = code.replace(place, value)
    return code
