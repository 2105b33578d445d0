"""What does training with a simulated user change? Sums by the quickstart's model, by the real command line: RLOO on single
answers, and RLOO on conversations with a user who asks again until the sum is right (``examples/stubborn_user.py``, which each run
starts beside itself).

    python benchmarks/user_simulator.py               # two ways, three seeds each: five minutes

Every model, and the one before training, talks to the same user about 500 held-out sums, with up to two answers. Prints as mean ±
standard error over the seeds the share of users who are satisfied by the first answer and by two, and the messages of the user that
a step asked for and that were known. Runs that are in ``--out`` already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_host.data.arithmetic import split_problems

USER = Path(__file__).resolve().parent.parent / "examples/stubborn_user.py"
TALK = ("--agent", "user_simulator", "--agent.serve", str(USER), "--agent.serve-with", "python {model} --port {port}")
TWO = ("--agent.max-turns", "2")
WAYS = {"rloo": ("--reward", "math_verifier"), "rloo, user": (*TALK, *TWO)}
COMMON = ("--algo", "rloo", "--model", "quickstart", "--n", "4", "--batch-size", "32", "--lr", "3e-4", "--max-new-tokens", "5")
QUIET = ("--checkpoint.every", "0", "--trajectories.every", "0", "--trajectories.show", "0", "--train.threads", "1")


def rlhf(*flags: str) -> str:
    """Returns what a command prints."""
    command = [sys.executable, "-m", "rlhf_host.cli.main", *flags]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr or done.stdout)
    return done.stdout


def data(out: Path) -> tuple[str, str]:
    """Writes sums to train on and sums to ask about."""
    train, held_out = split_problems(2, "+", 1500)
    paths = []
    for name, problems in (("train", train), ("asked", held_out[:500])):
        path = out / f"{name}.jsonl"
        rows = ({"prompt": prompt, "label": label, "user": prompt} for prompt, label in problems)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths.append(str(path))
    return paths[0], paths[1]


def satisfied(model: str, asked: str, run: Path) -> tuple[float, float]:
    """Returns the shares of held-out users who are satisfied by the first answer, and by two."""
    target = run.with_name(f"{run.name}-asked.json")
    if not target.is_file():
        asking = ("--model", model, "--data", asked, "--max-new-tokens", "5", "--json")
        target.write_text(rlhf("eval", *asking, *TALK, *TWO))
    metrics = json.loads(target.read_text())
    return 2 - metrics["eval/user/turns"], metrics[
        "eval/user/done"
    ]  # who is satisfied at once hears one answer, all others two


def shown(values: Sequence[float]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.3f} ± {error:.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("runs/user-simulator"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    train, asked = data(options.out)
    first = satisfied("quickstart", asked, options.out / "before")
    print("| run | first answer | two answers | user's messages asked for | known |\n|---|---|---|---|---|")
    print(f"| (before) | {first[0]:.3f} | {first[1]:.3f} | | |", flush=True)
    good = True
    for way, flags in WAYS.items():
        results: list[tuple[float, float]] = []
        steps: list[dict[str, Any]] = []
        for seed in options.seeds:
            run = options.out / f"{way.replace(', ', '-')}-{options.steps}-{seed}"
            if not (run / "model").is_dir():
                own = ("--data", train, "--seed", str(seed), "--steps", str(options.steps), "--run-dir", str(run))
                rlhf("train", *COMMON, *flags, *QUIET, *own)
            results.append(satisfied(str(run / "model"), asked, run))
            steps += [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        good &= min(two for _, two in results) > first[1]
        calls = [
            f"{statistics.fmean(row.get(f'user_simulator/{name}', 0.0) for row in steps):.0f}" for name in ("calls", "cached")
        ]
        print(f"| {way} | {' | '.join(map(shown, zip(*results, strict=True)))} | {' | '.join(calls)} |", flush=True)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
