"""Traces that a plugin leaves behind: threads, processes, temporary files."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from rlhf_authoring.contracts.subject import Broken

PATIENCE_S = 5.0
"""Seconds that whatever a run started may take to end after it."""


@contextlib.contextmanager
def leaves_nothing(after: str, remedy: str, *, daemons: bool = False, files: bool = False) -> Iterator[None]:
    """Raises ``Broken`` where what the body started is still there a while after it.

    Args:
        after: what is over then, for the message.
        remedy: where it should have ended.
        daemons: threads count too that would not keep the interpreter alive.
        files: temporary files count too; they are made in a directory that is the body's own.
    """
    threads, processes = set(threading.enumerate()), _children()
    with tempfile.TemporaryDirectory(prefix="rlhf-contract-") as folder:
        with mock.patch.object(tempfile, "tempdir", folder if files else tempfile.tempdir):
            yield
        end = time.monotonic() + PATIENCE_S
        while True:
            left = [f"thread {t.name}" for t in threading.enumerate() if t not in threads and (daemons or not t.daemon)]
            left += [f"process {pid} ({what})" for pid, what in _children().items() if pid not in processes]
            left += [f"file {path.name}" for path in Path(folder).iterdir()]
            if not left:
                return
            if time.monotonic() > end:
                raise Broken(f"after {after} there is still {', '.join(left)}; {remedy}")
            time.sleep(0.02)


def _children() -> dict[int, str]:
    """This process's living children and what they run, where the system shows them."""
    children = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # ended just now
            continue
        # multiprocessing's tracker stays until the interpreter ends, whoever started it.
        if int(parent) == os.getpid() and state not in "ZX" and "resource_tracker" not in command:
            children[int(folder.name)] = command
    return children
