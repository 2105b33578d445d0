"""Processes that are killed, for tests of what goes on after them: a run by the command line, and engines on Ray."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WITHIN_S = 300.0
"""Seconds in which a run must have its rows."""


def start(*flags: object) -> subprocess.Popen[bytes]:
    """Starts ``rlhf train`` in a process of its own, which nobody hears."""
    command = [sys.executable, "-m", "rlhf_host.cli.main", "train", *map(str, flags)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def curve(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the rows of ``metrics.jsonl``."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def killed_and_resumed(flags: Sequence[object], run_dir: Path, *, rows: int, steps: int) -> None:
    """Runs with these flags, is killed (SIGKILL) once ``rows`` rows of metrics are there, and is resumed to its end.

    Args:
        steps: those of the whole run: it must be killed before.
    """
    process = start(*flags, "--run-dir", run_dir)
    deadline = time.monotonic() + WITHIN_S
    while not (run_dir / "metrics.jsonl").exists() or len(curve(run_dir)) < rows:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert len(curve(run_dir)) < steps
    assert start("--resume", run_dir).wait() == 0


def engines(directory: str) -> list[int]:
    """Returns the process numbers of the engines that write to files of the Ray cluster in a directory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours
            opened = [os.readlink(each) for each in (entry / "fd").iterdir()]
            if "EngineActor" in (entry / "cmdline").read_text() and any(each.startswith(directory) for each in opened):
                found.append(int(entry.name))
    return found
