"""What can be shown only on a GPU, in one go: speed and memory against TRL, the log-probability kernel, Ray with DeepSpeed.

    python scripts/gpu_check.py --peer-python PATH [--rounds 3]

``PATH`` is the Python of an environment with ``torch`` and ``trl``. Prints each command before it runs and goes on after a failure;
leaves with 1 if there was any.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="Python of an environment with torch and trl; without it TRL is left out")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        sys.exit("no CUDA device here: run this where torch.cuda.is_available() is true")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    with tempfile.TemporaryDirectory() as folder:
        failed = [name for name, command in plan(options, Path(folder)) if not run(name, command)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def plan(options: argparse.Namespace, folder: Path) -> list[tuple[str, list[str]]]:
    """Name and command of every check whose libraries are there."""
    python = sys.executable
    train = [python, "-m", "rlhf_host.cli.main", "train", "--algo", "rloo", "--reward", "math_verifier"]
    short = ["--train.steps", "10", "--checkpoint.final", "false"]
    checks = [
        ("log-probability kernel", [python, "benchmarks/logprob_memory.py", "--device", "cuda", "--rows", "64"]),
        ("quickstart in bfloat16", [*train, *short, "--run-dir", str(folder / "local")]),
    ]
    if options.peer_python:
        peer = ["--peer-python", options.peer_python, "--rounds", str(options.rounds)]
        checks.append(
            ("against TRL", [python, "benchmarks/step_vs_trl.py", *peer, "--case", "1b", "--device", "cuda", "--json"])
        )
    if importlib.util.find_spec("ray") and importlib.util.find_spec("deepspeed"):
        ray = ["--runtime", "ray", "--backend", "deepspeed", "--backend.zero-stage", "2", "--placement", "actor+rollout=1"]
        checks.append(("Ray and DeepSpeed", [*train, *short, *ray, "--run-dir", str(folder / "ray")]))
    return checks


def run(name: str, command: list[str]) -> bool:
    print(f"\n== {name}\n$ {shlex.join(command)}", flush=True)
    return subprocess.run(command, cwd=ROOT).returncode == 0


if __name__ == "__main__":
    main()
