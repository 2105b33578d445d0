"""Start-up of ``rlhf --help`` and ``rlhf plugins`` with 20 plugin distributions installed, one of which fails on import and
one sleeps 2 s on import. Prints the median of ten warm runs and leaves with 1 when one is above 300 ms.

    python benchmarks/startup.py
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT_MS = 300
RUNS = 10
COMMANDS = (["--help"], ["plugins"], ["plugins", "--json"])


def install(folder: Path, number: int, code: str) -> None:
    """A distribution as pip leaves it: a module and its metadata."""
    (folder / f"startup_plugin_{number}.py").write_text(code)
    info = folder / f"startup_plugin_{number}-1.0.dist-info"
    info.mkdir()
    name = f"Name: startup-plugin-{number}\nVersion: 1.0\nSummary: One of twenty"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\n{name}\nRequires-Dist: rlhf-host<0.11,>=0.10\n")
    (info / "entry_points.txt").write_text(f"[rlhf.rewards]\nstartup_{number} = startup_plugin_{number}:Plugin\n")


def main() -> int:
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(20):
            code = {0: "raise RuntimeError('broken on import')", 1: "import time\ntime.sleep(2)"}.get(number, "import torch")
            install(Path(folder), number, f"{code}\nclass Plugin: ...\n")
        path = os.pathsep.join([folder, str(Path(__file__).resolve().parent.parent)])
        for arguments in COMMANDS:
            command = [sys.executable, "-m", "rlhf_host.cli.main", *arguments]
            times = []
            for _ in range(RUNS + 1):
                start = time.perf_counter()
                subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True, stdout=subprocess.DEVNULL)
                times.append(1000 * (time.perf_counter() - start))
            median = statistics.median(times[1:])
            slowest = max(slowest, median)
            print(f"rlhf {' '.join(arguments):16} median {median:4.0f} ms, first {times[0]:4.0f} ms, limit {LIMIT_MS} ms")
    return int(slowest > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
