"""Two-digit sums (``half_trained.py``) under RLOO on four runtimes, from everything in one process to Ray with DeepSpeed ZeRO-3
and two vLLM engines: the same seed and steps, by the real command line. Leaves with 1 unless sampler and trainer agree to 1e-4 at
every step of every run.

    python benchmarks/learning_curves.py                                  # 200 steps each: some ten minutes
    python benchmarks/learning_curves.py --steps 10 --only local --only zero3
    python benchmarks/learning_curves.py --steps 10 -- --eval.data.max-samples 100

The runs follow one another, one thread for each process. ``results.json`` in ``--out`` grows run by run, so that the same command
goes on where it was stopped; ``table.md`` is the table. Remove ``--out`` to begin anew, after a change to the code.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import half_trained
from learning_matrix import PASS, QUIET, write

LIMIT = 1e-4
"""On ``mismatch/max``: |log-probability in training − that of sampling|, the largest of a step's tokens, in fp32."""

RAY = ["--runtime", "ray", "--ray.num-cpus", "4", "--ray.num-gpus", "0", "--ray.object-store-mb", "200"]
DEEPSPEED = ["--backend", "deepspeed", "--engine", "vllm", "--placement", "actor=2"]

RUNTIMES: dict[str, tuple[str, list[str]]] = {
    "local": ("local, torch, transformers", []),
    "ray": ("Ray, torch, transformers", [*RAY, "--placement", "actor=1", "--placement", "rollout=1"]),
    "zero2": ("Ray, ZeRO-2 × 2, vLLM", [*RAY, *DEEPSPEED, "--backend.zero-stage", "2", "--placement", "rollout=1"]),
    "zero3": ("Ray, ZeRO-3 × 2, vLLM × 2", [*RAY, *DEEPSPEED, "--backend.zero-stage", "3", "--placement", "rollout=2"]),
}
"""Name → title and flags."""


def flags_of(name: str, steps: int, every: int, more: Sequence[str]) -> list[str]:
    """All that decides a run's result."""
    flags = [*half_trained.flags(), "--algo", "rloo", "--reward", "math_verifier"]
    flags += ["--seed", "0", "--eval.every", str(every)]
    return [*flags, "--train.steps", str(steps), *QUIET, *RUNTIMES[name][1], *more]


def train(name: str, flags: list[str], steps: int, out: Path) -> dict[str, Any]:
    """One run in a process of its own, in ``out``; its result, or what went wrong."""
    run_dir = out / name
    shutil.rmtree(run_dir, ignore_errors=True)
    command = [sys.executable, "-m", "rlhf_host.cli.main", "train", *flags, "--run-dir", str(run_dir)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    began = time.time()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        return {"flags": flags, "error": lines[-1] if lines else f"exit code {done.returncode}"}
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["step"]]
    if [row["step"] for row in trained] != list(range(1, steps + 1)) or rows[0]["step"] != 0:
        return {"flags": flags, "error": f"not every step up to {steps} is in {run_dir}"}
    curve, before = [], 0
    for row in rows:
        if PASS in row:
            rewards = [earlier["reward/mean"] for earlier in trained if before < earlier["step"] <= row["step"]]
            curve.append([row["step"], row[PASS], statistics.mean(rewards) if rewards else None])
            before = row["step"]
    worst = max(trained, key=lambda row: row["mismatch/max"])
    return {
        "flags": flags,
        "curve": curve,
        "mismatch": worst["mismatch/max"],
        "mismatch_step": worst["step"],
        "agrees": all(row["mismatch/max"] < LIMIT for row in trained),
        "seconds_per_step": statistics.median(row["time/step"] for row in trained),
        "start_s": rows[0]["time/wall"] - rows[0]["time/eval"] - began,
        "all_s": time.time() - began,
    }


def table(names: Sequence[str], results: Mapping[str, dict[str, Any]]) -> tuple[str, bool]:
    """The curves side by side and what each run took, in Markdown, and whether all of it is there and good."""
    done = [name for name in names if "curve" in results.get(name, {})]
    curves = {name: {step: (passed, reward) for step, passed, reward in results[name]["curve"]} for name in done}
    lines = [f"| steps | {' | '.join(RUNTIMES[name][0] for name in done)} |", "|---" * (len(done) + 1) + "|"]
    for step in sorted({step for curve in curves.values() for step in curve}):
        cells = [_cell(*curves[name][step]) if step in curves[name] else "" for name in done]
        lines.append(f"| {step} | {' | '.join(cells)} |")
    lines += ["", "| runtime | largest mismatch | at step | s/step | start-up | all |", "|---|---|---|---|---|---|"]
    for name in done:
        found = results[name]
        seconds = f"{found['seconds_per_step']:.2f} | {found['start_s']:.0f} s | {found['all_s']:.0f} s"
        lines.append(f"| {RUNTIMES[name][0]} | {found['mismatch']:.1e} | {found['mismatch_step']} | {seconds} |")
    return "\n".join(lines) + "\n", len(done) == len(names) and all(results[name]["agrees"] for name in done)


def _cell(passed: float, reward: float | None) -> str:
    return f"{passed:.3f}" if reward is None else f"{passed:.3f} ({reward:.3f})"


def main() -> int:
    arguments, more = sys.argv[1:], []
    if "--" in arguments:
        cut = arguments.index("--")
        arguments, more = arguments[:cut], arguments[cut + 1 :]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0], epilog="What follows -- goes to every run.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--eval-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--only", action="append", default=[], choices=RUNTIMES, help="repeatable")
    parser.add_argument("--out", type=Path, default=Path("runs/learning-curves"))
    options = parser.parse_args(arguments)

    names = [name for name in RUNTIMES if not options.only or name in options.only]
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "results.json"
    results: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    for name in names:
        flags = flags_of(name, options.steps, options.eval_every, more)
        before = results.get(name, {})
        if before.get("flags") == flags and "error" not in before:
            print(f"{name}: done before", flush=True)
            continue
        results[name] = found = train(name, flags, options.steps, options.out)
        write(file, json.dumps(results, indent=1) + "\n")
        write(options.out / "table.md", table(names, results)[0])
        told = found.get("error") or f"pass@1 {found['curve'][0][1]:.3f} to {found['curve'][-1][1]:.3f}"
        print(f"{name}: {told}", flush=True)
    text, good = table(names, results)
    write(options.out / "table.md", text)
    print(f"\n{text}\n{'good' if good else f'not good: every run must end, its mismatch below {LIMIT:g} at every step'}")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
