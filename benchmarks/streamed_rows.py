"""Memory and the time to the first step with a large file of prompts: streamed, and read as a whole.

    python benchmarks/streamed_rows.py                 # 1,500,000 rows of 400 bytes: 0.6 GB in --out, and it is removed
    python benchmarks/streamed_rows.py --rows 200000

Each of the two runs makes two steps on the quickstart's model by the real command line, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FLAGS = (
    "--algo",
    "rloo",
    "--reward",
    "math_verifier",
    "--model",
    "quickstart",
    "--n",
    "2",
    "--batch-size",
    "4",
    "--steps",
    "2",
)
QUIET = ("--max-new-tokens", "4", "--checkpoint.every", "0", "--checkpoint.final", "false", "--train.threads", "1")
WAYS = {"streamed": ("--data", "streaming", "--data.streaming.files"), "whole": ("--data",)}


def write(path: Path, rows: int) -> None:
    with path.open("w") as file:
        for number in range(rows):
            a, b = number % 89 + 10, number // 89 % 89 + 10
            row = {"prompt": f"{a}+{b}=", "label": str(a + b), "notes": f"{number:09d}" * 38}
            file.write(json.dumps(row) + "\n")


def peak_of(command: list[str]) -> tuple[float, float]:
    """Returns the largest resident memory of a process in MiB, and its seconds."""
    began = time.monotonic()
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"exit code {os.waitstatus_to_exitcode(status)}")
    return used.ru_maxrss / 1024, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rows", type=int, default=1_500_000)
    parser.add_argument("--only", choices=WAYS, action="append")
    options = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write(path, options.rows)
        print(f"{options.rows:,} rows, {path.stat().st_size / 1e6:,.0f} MB", file=sys.stderr)
        for way in options.only or WAYS:
            command = [sys.executable, "-m", "rlhf_host.cli.main", "train", *FLAGS, *WAYS[way], str(path), *QUIET]
            peak, seconds = peak_of([*command, "--run-dir", str(Path(folder) / way)])
            results[way] = {"peak_mib": round(peak), "seconds": round(seconds, 1)}
    print(json.dumps({"rows": options.rows, **results}))


if __name__ == "__main__":
    main()
