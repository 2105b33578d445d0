"""Real Ray clusters of several machines, on the loopback address, each held by a process of its own."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def held(script: str, **more: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str], str]]:
    """Runs a script that makes a cluster, prints its address, and shuts it down when its input ends.

    Args:
        more: further variables of its environment.

    Yields:
        The process, what those who join need in their environment, and the cluster's address.
    """
    with tempfile.TemporaryDirectory(prefix="rc-", dir="/tmp", ignore_cleanup_errors=True) as made:
        Path(made, "ray").mkdir()
        ours = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # keeps it on the loopback
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": made,
        } | more
        command, environment = [sys.executable, "-c", script], {**os.environ, **ours}
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            yield process, ours, process.stdout.readline().strip()
            process.communicate(timeout=60)
