"""What every comparison with TRL needs: its programs and ours as processes of so many threads, and the speed of this machine."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def flags(settings: Mapping[str, Any]) -> list[str]:
    return [text for key, value in settings.items() for text in (f"--{key}", str(value))]


def run_ours(arguments: Sequence[str], run_dir: Path, threads: int, path: Sequence[Path] = ()) -> list[dict[str, float]]:
    """``rlhf train`` in ``run_dir``: the rows of ``metrics.jsonl`` that are steps.

    Args:
        path: further places of plugins.
    """
    command = [sys.executable, "-m", "rlhf_host.cli.main", "train", *arguments, "--run-dir", str(run_dir)]
    places = [*map(str, path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(places), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"rlhf train failed: {last_error(done.stderr)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"] > 0]


def run_peer(python: str, program: str, arguments: Sequence[str], threads: int) -> dict[str, Any]:
    """One of TRL's programs of this folder: the object that it prints last."""
    command = [python, str(Path(__file__).with_name(program)), *arguments, "--threads", str(threads)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": str(threads)}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"TRL failed: {last_error(done.stderr)}\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def last_error(stderr: str) -> str:
    """The line of the last exception, or the last line that is not empty."""
    errors = re.findall(r"^(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)\b.*)$", stderr, re.MULTILINE)
    return (errors or [line for line in stderr.splitlines() if line.strip()] or ["it printed nothing"])[-1].strip()


def matmul_gflops(threads: int, size: int = 1024) -> float:
    import torch

    torch.set_num_threads(threads)
    left, right = torch.randn(size, size), torch.randn(size, size)
    times = []
    for _ in range(8):
        started = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - started)
    return 2 * size**3 / statistics.median(times) / 1e9
