"""Does it pay to choose tasks, or to train again on groups of earlier steps? RLOO alone, with ``curriculum``, with
``dynamic_filtering`` and with ``replay_buffer``: sums of one to three digits by the quickstart's model, by the real command line.

    python benchmarks/data_that_learns.py                          # five ways, three seeds each: ten minutes
    python benchmarks/data_that_learns.py --only curriculum --seeds 0 --steps 10

One file of 100 sums of two digits, which the model half knows, 40 of one digit, which it knows, and 160 of three, which it hardly
does: so each comes about four times in 40 steps.
Prints pass@1 over 1,500 held-out sums of two digits as mean ± standard error over the seeds, the share of groups without a
signal, and answers sampled per step. Runs that are in ``--out`` already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rlhf_host.data.arithmetic import split_problems

MIX = ((1, 20, 40), (2, 1500, 100), (3, 1500, 160))
"""Digits, held-out problems, problems."""
FILTER = ("--with", "dynamic_filtering", "--rollout.max-refills", "5")
WAYS = {
    "rloo": (),
    "dynamic_filtering": FILTER,
    "curriculum": ("--with", "curriculum"),
    "curriculum, pools": ("--with", "curriculum", "--curriculum.strategy", "pools"),
    "replay_buffer": ("--with", "replay_buffer"),
}
COMMON = (
    "--algo",
    "rloo",
    "--reward",
    "math_verifier",
    "--model",
    "quickstart",
    "--n",
    "4",
    "--batch-size",
    "32",
    "--lr",
    "3e-4",
)
QUIET = ("--checkpoint.every", "0", "--trajectories.every", "0", "--trajectories.show", "0", "--train.threads", "1")


def data(out: Path) -> list[str]:
    """Writes the sums, and returns the flags that name them."""
    path = out / "sums.jsonl"
    problems = [each for digits, held_out, count in MIX for each in split_problems(digits, "+", held_out)[0][:count]]
    path.write_text("".join(json.dumps({"prompt": prompt, "label": label}) + "\n" for prompt, label in problems))
    return ["--data", str(path), "--eval.data", "arithmetic"]


def train(way: str, seed: int, steps: int, out: Path) -> dict[str, Any]:
    """Returns pass@1 before and after one run, and what its steps took."""
    run = out / f"{way.replace(', ', '-')}-{steps}-{seed}"
    if not (run / "model").is_dir():
        flags = [
            *COMMON,
            *WAYS[way],
            *data(out),
            "--eval.every",
            str(steps),
            "--max-new-tokens",
            "5",
            "--seed",
            str(seed),
            *QUIET,
        ]
        command = [sys.executable, "-m", "rlhf_host.cli.main", "train", *flags, "--steps", str(steps), "--run-dir", str(run)]
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr or done.stdout)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured, steps_ = [row["eval/pass@1"] for row in rows if "eval/pass@1" in row], [row for row in rows if row["step"]]
    dead = statistics.fmean(row["groups/no_variance"] - row.get("replay/groups", 0) / row["rollout/groups"] for row in steps_)
    drawn = statistics.fmean(row["rollout/drawn"] for row in steps_)
    return {"before": measured[0], "after": measured[-1], "dead": dead, "answers": 4 * drawn}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", action="append", choices=list(WAYS), help="repeatable")
    parser.add_argument("--out", type=Path, default=Path("runs/data-that-learns"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    good = True
    print("| run | pass@1 before | after | groups without a signal | answers per step |\n|---|---|---|---|---|")
    for way in options.only or WAYS:
        results = [train(way, seed, options.steps, options.out) for seed in options.seeds]
        after, before = [result["after"] for result in results], results[0]["before"]
        error = statistics.stdev(after) / len(after) ** 0.5 if len(after) > 1 else 0.0
        good &= min(after) > before
        dead, answers = (statistics.fmean(result[name] for result in results) for name in ("dead", "answers"))
        print(
            f"| {way} | {before:.3f} | {statistics.fmean(after):.3f} ± {error:.3f} | {dead:.0%} | {answers:.0f} |", flush=True
        )
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
