"""Work in a process of its own, answering as it goes: neither a crash nor a hang of a plugin reaches the command line.

A tracker that is looked at sends nothing anywhere, unless the environment says so.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from rlhf_host import Scratch


class ChildFailed(Exception):
    """The work ended, or hung (``timed_out``), before it was done; ``trace`` is what it wrote to stderr."""

    def __init__(self, reason: str, errors: Path, timed_out: bool = False):
        super().__init__(reason)
        self.trace = errors.read_text(encoding="utf-8", errors="replace")
        self.timed_out = timed_out

    @property
    def tail(self) -> str:
        """The end of ``trace``."""
        return "\n".join(self.trace.rstrip().splitlines()[-20:])


def answers(work: str, job: Mapping[str, Any], deadline_s: float) -> Iterator[Any]:
    """Yields what ``work`` yields for ``job``, as it comes.

    Args:
        work: ``module:function``; the function takes ``job`` and yields JSON values.
        job: JSON values.
        deadline_s: longest wait for one answer.

    Raises:
        ChildFailed: no answer in time, or the process ended.
    """
    with Scratch("rlhf-child-", tempfile.gettempdir()) as folder:
        errors = Path(folder, "stderr")
        with errors.open("wb") as stderr:
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, work, json.dumps(job)],
                env={"WANDB_MODE": "offline", **os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                stdin=subprocess.PIPE,  # it ends with this process, however that ends
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
            lines: SimpleQueue[bytes] = SimpleQueue()
            threading.Thread(target=_read, args=(child, lines), daemon=True).start()
            try:
                while (answer := json.loads(_next(child, lines, deadline_s, errors))) is not None:
                    yield answer
            finally:
                _end(child)


def _next(child: subprocess.Popen[bytes], lines: SimpleQueue[bytes], deadline_s: float, errors: Path) -> bytes:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        ended = child.poll() is not None  # children of its own may hold the pipe open
        try:
            line = lines.get(timeout=min(0.5, deadline_s))
        except Empty:
            line = b""
            if not ended:
                continue
        if line:
            return line
        raise ChildFailed(f"ended the process with exit code {child.wait()}", errors)
    raise ChildFailed(f"took longer than {deadline_s:g} s", errors, timed_out=True)


def _read(child: subprocess.Popen[bytes], lines: SimpleQueue[bytes]) -> None:
    assert child.stdout is not None
    with child.stdout:
        for line in child.stdout:
            lines.put(line)
    lines.put(b"")


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the child, its own children included."""
    if child.poll() is None:
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
        child.wait()


def _end_with_parent(pipe: int) -> None:
    """Waits until nobody holds the other end; then this process ends, its own children included."""
    os.read(pipe, 1)
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _child(work: str, job: str) -> None:
    threading.Thread(target=_end_with_parent, args=(os.dup(0),), daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    answered = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what plugins print is no answer
    module, _, function = work.partition(":")
    for answer in getattr(importlib.import_module(module), function)(json.loads(job)):
        print(json.dumps(answer), file=answered, flush=True)
    print("null", file=answered, flush=True)
    os._exit(0)  # threads that a plugin left behind must not hold the end back


if __name__ == "__main__":
    _child(*sys.argv[1:])
