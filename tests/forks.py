"""The ``rlhf`` command forked from one process that has imported what it imports: a short run takes 1 s instead of 6.

A forked command has what a new process would have: its own environment, directory, import path and plugins, signals, the end of
an interpreter. What it cannot show is a mistake in starting: a module imported too early or too late, a variable that a library
reads as it is loaded. So each command has a test that starts an interpreter (``test_start.py``), as do those of signals,
exit codes and import times. Scripts that tests need as processes of their own are forked the same way.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

COMMAND = "rlhf_host.cli.main"
IMPORTED = (
    "rich.console",
    "rich.progress",
    "rich.table",
    "torch",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "rlhf_host.api",
    "rlhf_host.backends.torch_backend",
    "rlhf_host.cli.train",
    "rlhf_host.engines.embedded",
    "rlhf_host.runtimes.local_runtime",
    "rlhf_host.training.run",
)
READ_LATE = ("COLUMNS", "COMP_", "PYTEST_", "PYTHONPATH", "RAY_", "RLHF_", "SEEN", "_RLHF_")
"""Beginnings of the variables that a command may have of its own: no library reads them while it is imported."""


def never_wait_for_the_disk() -> None:
    """Makes ``os.fsync`` do nothing, in this process and its forks: a run calls it fourteen times, a tenth of a second. Only a
    machine that loses its power would show that it was left out, and no test takes it away.
    """
    os.fsync = lambda descriptor: None


# --- where tests are ----------------------------------------------------------------------------------


class ForkServer:
    """Forks commands and scripts, from the first on; ``close`` ends it, not them."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.folder = tempfile.TemporaryDirectory(prefix="rlhf-forks-")
        self.address = str(Path(self.folder.name, "socket"))
        self.process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        command, pipe = [sys.executable, __file__, self.address], subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=self.environment)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n", "the process that commands are forked from did not start"

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        directory: Path | str | None = None,
        *,
        program: str | Path = COMMAND,
        stdout: IO[Any] | None = None,
        stderr: IO[Any] | None = None,
        text: bool = True,
    ) -> Forked:
        """``program`` is a module or a script; what it prints goes to the file, or to a pipe, of ``text`` or bytes."""
        names = environment.keys() | self.environment.keys()
        other = {name for name in names if environment.get(name) != self.environment.get(name)}
        early = {name for name in other if not name.startswith(READ_LATE)}
        assert not early, f"{sorted(early)} may be read while libraries are imported: test it with rlhf_process"
        if self.process is None:
            self.begin()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(self.address)
        ours, theirs = zip(*map(_ends, range(3), (None, stdout, stderr)), strict=True)
        body = json.dumps([str(program), [*map(str, arguments)], dict(environment), str(directory or Path.cwd())]).encode()
        socket.send_fds(connection, [b"."], theirs)
        connection.sendall(body)
        connection.shutdown(socket.SHUT_WR)
        for descriptor in theirs:
            os.close(descriptor)
        return Forked(connection, arguments, ours, text)

    def close(self) -> None:
        if self.process is not None:
            with self.process as process:
                process.communicate(timeout=30)  # it ends with its input
        self.folder.cleanup()


def _ends(number: int, file: IO[Any] | None) -> tuple[int | None, int]:
    """This process's end and the other's of what that has as standard input (0), output or error."""
    if file is not None:
        return None, os.dup(file.fileno())
    read, write = os.pipe()
    return (write, read) if number == 0 else (read, write)


class Forked:
    """A command at work, with what tests use of ``subprocess.Popen``."""

    def __init__(self, connection: socket.socket, arguments: Sequence[str], ends: Sequence[int | None], text: bool):
        self.args = [*arguments]
        self.returncode: int | None = None
        self.stdin, self.stdout, self.stderr = (
            None if end is None else os.fdopen(end, mode, encoding="utf-8") if text else os.fdopen(end, mode + "b")
            for end, mode in zip(ends, "wrr", strict=True)
        )
        self._reports = connection.makefile("r")
        connection.close()
        number = self._reports.readline()
        assert number, "the process that commands are forked from has ended"
        self.pid = int(number)

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._reports], [], [], 0)[0]:
            self.returncode = os.waitstatus_to_exitcode(int(self._reports.readline()))
            self._reports.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._reports], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        with ThreadPoolExecutor(2) as pool:
            out, err = (pool.submit(stream.read) if stream else None for stream in (self.stdout, self.stderr))
            try:
                with contextlib.suppress(BrokenPipeError), self.stdin:
                    self.stdin.write(input or "")
                self.wait(timeout)
            except BaseException:
                self.kill()  # or the readers would wait on
                raise
        return out and out.result(), err and err.result()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# --- the process that forks ---------------------------------------------------------------------------


def serve(address: str) -> None:
    """Forks; returns in each of the processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in IMPORTED:
        importlib.import_module(module)
    assert COMMAND not in sys.modules
    assert {name.partition(".")[0] for name in sys.modules if name.startswith("rlhf_")} == {"rlhf_host"}, "not a plugin"
    threads = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else threading.active_count()
    assert threads == 1, f"{threads} threads: a fork would have the locks that others hold, and nobody to open them"
    never_wait_for_the_disk()
    importlib.import_module("rlhf_host.garbage").freeze()  # what is shared with the commands stays shared
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if listener not in ready:
            sys.exit()
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return watch(connection)
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def watch(connection: socket.socket) -> None:
    """Fork once more, tell the process's number and how it ended; returns in the process."""
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("r") as file:
        request = json.load(file)
    if process := os.fork():
        for descriptor in descriptors:
            os.close(descriptor)
        connection.sendall(f"{process}\n".encode())
        _, status = os.waitpid(process, 0)
        with contextlib.suppress(OSError):
            connection.sendall(f"{status}\n".encode())
        os._exit(0)
    connection.close()
    become(*request, descriptors)


def become(program: str, arguments: list[str], environment: dict[str, str], directory: str, descriptors: list[int]) -> None:
    """What ``python -m MODULE`` or ``python SCRIPT`` makes of a new process."""
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(directory)
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = [entry for entry in sys.path if entry not in inherited]
    os.environ.clear()
    os.environ.update(environment)
    first = os.path.dirname(program) if program.endswith(".py") else directory
    sys.path[:] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *own]
    importlib.invalidate_caches()
    sys.argv[:] = [program, *arguments]


def run(program: str) -> int:
    """The exit code, as the interpreter would have it."""
    try:
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file
    serve(sys.argv[1])
    code = run(sys.argv[0])
    # All that an interpreter does at its end but for taking apart every module, which would copy the memory shared so far.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
