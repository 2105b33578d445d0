"""Rewards without labels beside the label: RLOO on the quickstart's sums with ``math_verifier``, and with judges that compare the
answers of a group, check a row's criteria or hold a tournament.

    python benchmarks/judges.py                        # five rewards, three seeds, 60 steps: some ten minutes
    python benchmarks/judges.py --seeds 0 --steps 20 --only ruler

The judge, ``examples/sum_judge.py``, is a server of OpenAI's API that each run starts beside itself. It reads the task and the
answers out of the text that the reward sends, and judges by how near an answer is to the right sum. So the table shows what is lost
between a judge that knows and the policy. Prints pass@1 over 500 held-out sums, by the label in every run, and what was asked.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rlhf_host
from rlhf_host.data.arithmetic import split_problems

JUDGE = Path(__file__).resolve().parent.parent / "examples/sum_judge.py"
EVERY = 20
HELD_OUT = 500
CRITERIA = (
    {"criterion": "The sum is right.", "weight": 3},
    {"criterion": "The last digit is right.", "weight": 1},
    {"criterion": "It is not a number.", "weight": -1},
)
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "math_verifier": {"name": "math_verifier"},
    "ruler": {"name": "ruler"},
    "rubrics": {"name": "rubrics"},
    "tournament": {"name": "tournament", "max_tokens": 64},
    "tournament, 2 Swiss rounds in one order": {"name": "tournament", "rounds": 2, "orders": "one"},
}


def data(out: Path) -> dict[str, str]:
    """Writes sums without labels but with criteria, and held-out ones with labels."""
    train, held_out = split_problems(2, "+", 1500)
    rows = [{"prompt": prompt, "rubric": CRITERIA} for prompt, _ in train]
    labelled = [{"prompt": prompt, "label": label} for prompt, label in train]
    known = [{"prompt": prompt, "label": label} for prompt, label in held_out[:HELD_OUT]]
    files = {}
    for name, lines in (("unlabelled", rows), ("labelled", labelled), ("held_out", known)):
        files[name] = str(out / f"{name}.jsonl")
        Path(files[name]).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return files


def train(name: str, seed: int, steps: int, files: Mapping[str, str], out: Path) -> list[dict[str, float]]:
    """Returns the metrics of one run."""
    reward = dict(VARIANTS[name])
    if name != "math_verifier":
        reward |= {"serve": str(JUDGE), "serve_with": "python {model} --port {port}"}
    run_dir = out / f"{re.sub(r'[^a-z0-9_]+', '-', name.lower())}-{steps}-{seed}"
    if not (run_dir / "done").exists():
        run = rlhf_host.train(
            algo="rloo",
            rewards={"judge": reward},
            model="quickstart",
            seed=seed,
            run_dir=str(run_dir),
            actor={"lr": 1e-3, "schedule": "linear", "warmup_steps": 10},
            data=files["labelled" if name == "math_verifier" else "unlabelled"],
            rollout={"n": 4, "max_new_tokens": 8},
            train={"steps": steps, "batch_size": 64, "threads": 1},
            eval={"data": files["held_out"], "every": EVERY, "reward": "math_verifier"},
            checkpoint={"every": 0, "final": False},
            trajectories={"every": 0},
        )
        (run_dir / "done").write_text(json.dumps(run.metrics))
    rows: list[dict[str, float]] = json.loads((run_dir / "done").read_text())
    return rows


def line(name: str, runs: Sequence[Sequence[Mapping[str, float]]]) -> str:
    """Returns the row of a reward: medians over the seeds."""
    curves = [[row["eval/pass@1"] for row in rows if "eval/pass@1" in row] for rows in runs]
    medians = [f"{statistics.median(values):.3f}" for values in zip(*curves, strict=True)]
    ends = [values[-1] for values in curves]

    def each(metric: str) -> float:
        return statistics.mean(row.get(f"judge/{metric}", 0.0) for rows in runs for row in rows if row["step"])

    asked = "" if name == "math_verifier" else f"{each('calls'):.0f} | {each('cached'):.0f} | {each('tokens_in'):,.0f}"
    return f"| {name} | {' | '.join(medians)} | {min(ends):.3f} to {max(ends):.3f} | {asked or ' | | '} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", action="append", choices=VARIANTS, help="repeatable")
    parser.add_argument("--out", type=Path, default=Path("runs/judges"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    files = data(options.out)
    steps = range(0, options.steps + 1, EVERY)
    lines = [f"| reward | {' | '.join(f'step {step}' for step in steps)} | ends | calls a step | known | tokens read |"]
    lines.append("|---" * (len(steps) + 5) + "|")
    for name in options.only or VARIANTS:
        runs = [train(name, seed, options.steps, files, options.out) for seed in options.seeds]
        lines.append(line(name, runs))
        print(lines[-1], flush=True)
    print("\n".join(["", *lines]))


if __name__ == "__main__":
    main()
