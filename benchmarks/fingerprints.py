"""Fingerprints of six small runs: whether a change to the code leaves metrics and weights as they were, bit by bit.

    python benchmarks/fingerprints.py --write BEFORE.json       # before the change
    python benchmarks/fingerprints.py --compare BEFORE.json     # after it; exit code 1 if something differs
    python benchmarks/fingerprints.py --compare BEFORE.json --only rloo --only dpo

Each run is the real command line in a process of its own, on one thread, with a tiny model and fixed seeds. A fingerprint has one
hash per metric, of its values at all steps, and one per tensor of every ``*.safetensors`` in the run directory. Metrics that match
``MEASURED`` are left out. The run on Ray is not hashed: its metrics, and the sum and the sum of magnitudes of each tensor, are
compared to ``TOLERANCE``. A random model gives no right sums, so ``format`` rewards some of the answers.

A file is valid only for the machine and the build of torch that wrote it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from rlhf_authoring.models import write_tiny_model
from safetensors.torch import load_file

MEASURED = ("time/*", "memory/*", "*_gb", "*_per_s", "tflops", "mfu", "engine/kv_use", "engine/preemptions")
"""Metrics of time, memory and speed, and of how full an engine was, which depends on when requests reach it."""

TOLERANCE = 1e-5
"""On what is not hashed: relative to the value, or absolute for values below 1."""

EACH = ["--actor.lr", "1e-3", "--train.batch-size", "4", "--train.steps", "3", "--train.threads", "1", "--seed", "0"]
ONLINE = [
    *("--data", "arithmetic", "--reward", "math_verifier", "--reward", "format", "--reward.format.pattern", ".*[aeiou].*"),
    *("--rollout.n", "4", "--rollout.max-new-tokens", "8"),
]
RAY = [
    *("--runtime", "ray", "--ray.num-cpus", "4", "--ray.num-gpus", "0", "--ray.object-store-mb", "200"),
    *("--backend", "deepspeed", "--backend.zero-stage", "2", "--engine", "vllm"),
    *("--placement", "actor=2", "--placement", "rollout=1"),
]


@dataclass(frozen=True)
class Run:
    flags: list[str]
    exact: bool = True
    """Hashed; else its numbers are compared to ``TOLERANCE``."""

    hidden: int = 32
    """Width of the model. vLLM has no attention kernel for CPUs with heads as narrow as those of the smallest."""


RUNS = {
    "rloo": Run(["--algo", "rloo", *ONLINE, "--eval.data", "arithmetic", "--eval.data.max-samples", "8", "--eval.every", "2"]),
    "ppo": Run(["--algo", "ppo", *ONLINE, "--critic.lr", "1e-3", "--kl.coef", "0.05", "--train.minibatches", "2"]),
    "dpo": Run(["--algo", "dpo", "--data", "pairs.jsonl"]),
    "rloo-lora": Run(["--algo", "rloo", *ONLINE, "--actor.lora.rank", "4"]),
    "rloo-ahead": Run(["--algo", "rloo", *ONLINE, "--pipeline.schedule", "fixed", "--async-depth", "1"]),
    "rloo-ray": Run(["--algo", "rloo", *ONLINE, *RAY], exact=False, hidden=128),
}
"""Name → what is run."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FILE.json", help="run, and write the fingerprints")
    what.add_argument("--compare", type=Path, metavar="FILE.json", help="run, and compare with those of the file")
    parser.add_argument("--only", action="append", choices=RUNS, help="repeatable; default: all")
    options = parser.parse_args()
    names = options.only or list(RUNS)
    if options.write:
        written = {}
        for name in names:
            written[name] = fingerprint(name)
            print(f"{name}: {', '.join(f'{len(values)} {part}' for part, values in written[name].items())}", flush=True)
        options.write.write_text(json.dumps({"torch": torch.__version__, "runs": written}, indent=1, sort_keys=True) + "\n")
        return 0
    before = json.loads(options.compare.read_text())
    if before["torch"] != torch.__version__:
        sys.exit(f"{options.compare} was written with torch {before['torch']}, this is {torch.__version__}: write it anew")
    missing = [name for name in names if name not in before["runs"]]
    if missing:
        sys.exit(f"{options.compare} has no {', '.join(missing)}: write it anew, or choose others with --only")
    differing = 0
    print(f"{'run':<12} {'metrics equal':<14} weights equal")
    for name in names:
        now = fingerprint(name)
        apart = {part: differences(before["runs"][name][part], now[part]) for part in ("metrics", "weights")}
        differing += any(apart.values())
        metrics, weights = ("no" if apart[part] else "yes" for part in ("metrics", "weights"))
        print(f"{name:<12} {metrics:<14} {weights}", flush=True)
        for part, keys in apart.items():
            if keys:
                rest = f" and {len(keys) - 8} more" if len(keys) > 8 else ""
                print(f"  {part} that differ: {', '.join(keys[:8])}{rest}", flush=True)
    return int(differing > 0)


def fingerprint(name: str) -> dict[str, dict[str, Any]]:
    """Metric → hash or values, and tensor → hash or sums, of a run that is made now."""
    run = RUNS[name]
    with tempfile.TemporaryDirectory(prefix="fingerprint-") as made:
        folder = Path(made)
        write_tiny_model(folder / "model", hidden=run.hidden, seed=0)
        write_pairs(folder / "pairs.jsonl")
        command = [str(Path(sys.executable).with_name("rlhf")), "train", *run.flags, *EACH, "--actor.model", "model"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([*command, "--run-dir", "run"], cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{name}: rlhf train failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        metrics = read_metrics(folder / "run/metrics.jsonl")
        weights = dict(tensors(folder / "run"))
        if run.exact:
            return {
                "metrics": {metric: digest(json.dumps(values).encode()) for metric, values in metrics.items()},
                "weights": {key: digest(_bytes(tensor)) for key, tensor in weights.items()},
            }
        sums = {key: [tensor.double().sum().item(), tensor.double().abs().sum().item()] for key, tensor in weights.items()}
        return {"metrics": metrics, "weights": sums}


def write_pairs(path: Path) -> None:
    """Rows for ``dpo``: right answers preferred to wrong ones."""
    numbers = [(a, b) for a in range(3, 8) for b in range(2, 6)]
    rows = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a * b + 11)} for a, b in numbers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_metrics(path: Path) -> dict[str, list[float | None]]:
    """Metric → step, value, step, value …; ``None`` for a value that was not finite."""
    found: dict[str, list[float | None]] = {}
    for row in map(json.loads, path.read_text().splitlines()):
        step = row.pop("step")
        for metric, value in row.items():
            if not any(fnmatch(metric, pattern) for pattern in MEASURED):
                found.setdefault(metric, []).extend([float(step), None if value is None else float(value)])
    return found


def tensors(run_dir: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of every ``*.safetensors``; its name begins with the folder's, because several files may hold one model."""
    for file in sorted(run_dir.rglob("*.safetensors")):
        for name, tensor in sorted(load_file(file).items()):
            yield f"{file.parent.relative_to(run_dir)}:{name}", tensor


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _bytes(tensor: torch.Tensor) -> bytes:
    about = f"{tensor.dtype} {list(tensor.shape)} ".encode()
    return about + tensor.flatten().view(torch.uint8).numpy().tobytes()


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names of what is not equal, or is in one of the two only."""
    return sorted(key for key in before.keys() | now.keys() if not equal(before.get(key), now.get(key)))


def equal(before: Any, now: Any) -> bool:
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return all(equal(a, b) for a, b in zip(before, now, strict=True))
    if isinstance(before, float) and isinstance(now, float):
        return math.isclose(before, now, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(before == now)


if __name__ == "__main__":
    sys.exit(main())
