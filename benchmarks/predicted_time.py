"""The time of a run as ``rlhf plan --time`` predicts it, beside what the run took: seven shapes, on this CPU.

    python benchmarks/predicted_time.py                 # all; about ten minutes on two quiet cores
    python benchmarks/predicted_time.py --only sft      # shapes with this in their name
    python benchmarks/predicted_time.py --smollm2 DIR   # default: models/SmolLM2-135M-Instruct (make smollm2)

Each prediction and each run has a process of its own. Wall seconds say something on a quiet machine alone; CPU seconds of the
process also where others compute. Lengths of answers are those of answers to 20 prompts, sampled before (``--measure-answers``).
The table has means over steps without the first two, in which a process grows: its memory, its threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing, redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "examples/data"
SMOLLM2 = ROOT / "models/SmolLM2-135M-Instruct"
REAL = ("--actor.model", "SMOLLM2", "--data", str(DATA / "gsm8k_sample.jsonl"))
TINY = ("--train.batch-size", "32", "--rollout.n", "8", "--rollout.max-new-tokens", "4")
ONLINE = ("--reward", "math_verifier")
SHAPES: dict[str, tuple[int, tuple[str, ...]]] = {
    "quickstart": (12, ("--algo", "rloo", *ONLINE)),
    "tiny, 32 × 8 short answers": (12, ("--algo", "rloo", *ONLINE, *TINY)),
    "tiny, PPO with a critic": (12, ("--algo", "ppo", *ONLINE, *TINY)),
    "SmolLM2, 4 × 8 answers of 48": (
        4,
        ("--algo", "rloo", *ONLINE, *REAL, "--train.batch-size", "4", "--rollout.n", "8", "--rollout.max-new-tokens", "48"),
    ),
    "SmolLM2, 2 × 4 answers of 24": (
        5,
        ("--algo", "rloo", *ONLINE, *REAL, "--train.batch-size", "2", "--rollout.n", "4", "--rollout.max-new-tokens", "24"),
    ),
    "SmolLM2, SFT on 32 short rows": (
        8,
        ("--algo", "sft", "--actor.model", "SMOLLM2", "--data", str(DATA / "sums_answers.jsonl"), "--train.batch-size", "32"),
    ),
    "tiny, DPO": (12, ("--algo", "dpo", "--actor.model", "quickstart", "--data", str(DATA / "sums_pairs.jsonl"))),
}
"""Name → steps of the real run, and flags."""
QUIET = ("--checkpoint.every", "0", "--checkpoint.final", "false", "--trajectories.every", "0")
QUIET += ("--eval.at-start", "false", "--eval.at-end", "false", "--eval.every", "0")


def flags_of(name: str, smollm2: Path) -> list[str]:
    return [str(smollm2) if word == "SMOLLM2" else word for word in (*SHAPES[name][1], *QUIET)]


def predicted(flags: list[str]) -> dict[str, Any]:
    """Predicts in this process."""
    from rlhf_plan.time_plan import Asked, predict

    from rlhf_host.config.flags import parse
    from rlhf_host.settings import merge_needs, read_config, resolve

    loaded = read_config([], parse(flags))
    run = resolve(loaded.config, loaded.origins)
    began = time.perf_counter()
    with closing(run.plugins()) as manager:
        made = predict(run.config, manager, Asked(measure=merge_needs(manager).samples))
    return {"step": made.json()["step"], "cpu": made.json()["cpu"], "took": time.perf_counter() - began}


def measured(flags: list[str], steps: int) -> dict[str, Any]:
    """Runs in this process."""
    from rlhf_plan.dry_steps import WARM, Clock

    from rlhf_host.config.flags import parse
    from rlhf_host.internals import train
    from rlhf_host.settings import RunConfig, read_config, resolve

    clock = Clock()
    loaded = read_config([], parse([*flags, "--train.steps", str(steps)]))
    with tempfile.TemporaryDirectory() as place:
        tree = loaded.config.model_dump(by_alias=True) | {
            "run_dir": f"{place}/run",
            "tracker": {"clock": {"name": "python:clock"}},
        }
        run = resolve(RunConfig.model_validate(tree), objects={("tracker", "clock"): clock})
        with closing(run.plugins()) as manager:
            train(run.config, manager)
    rows = clock.rows
    cpu = (rows[-1]["cpu"] - rows[WARM - 1]["cpu"]) / (len(rows) - WARM)
    return {"step": statistics.fmean(row["time/step"] for row in rows[WARM:]), "cpu": cpu}


def in_child(part: str, name: str, smollm2: Path) -> dict[str, Any]:
    words = [sys.executable, __file__, "--child", part, "--only", name, "--smollm2", str(smollm2)]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if done.returncode:
        sys.exit(f"{name}, {part}: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def cells(span: dict[str, float], value: float) -> str:
    """Returns the predicted range with its middle, the measured value, and how they differ."""
    place = "inside" if span["low"] <= value <= span["high"] else "outside"
    error = 100 * (span["middle"] / value - 1)
    return f"{span['low']:.3g} to {span['high']:.3g} ({span['middle']:.3g}) | {value:.3g} | {place}, {error:+.0f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="shapes with this in their name")
    parser.add_argument("--smollm2", type=Path, default=SMOLLM2, metavar="DIR", help="where that model is")
    parser.add_argument("--child", choices=("predict", "measure"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        steps, flags = SHAPES[asked.only][0], flags_of(asked.only, asked.smollm2)
        with redirect_stdout(sys.stderr):
            found = predicted(flags) if asked.child == "predict" else measured(flags, steps)
        print(json.dumps(found))
        return
    if not asked.smollm2.is_dir():
        sys.exit(f"{asked.smollm2} is not there: make smollm2, or --smollm2 DIR")
    began = time.perf_counter()
    head = "predicted | measured | "
    print(f"| a step of | wall seconds, {head}| CPU seconds, {head}|\n|---|---|---|---|---|---|---|", flush=True)
    for name in (name for name in SHAPES if asked.only.lower() in name.lower()):
        plan, run = (in_child(part, name, asked.smollm2) for part in ("predict", "measure"))
        print(f"| {name} | {cells(plan['step'], run['step'])} | {cells(plan['cpu'], run['cpu'])} |", flush=True)
    print(f"\n{time.perf_counter() - began:.0f} s in all", file=sys.stderr)


if __name__ == "__main__":
    main()
