"""Do algorithms learn that need more than answers and rewards? CPO and DRO on made rows, online DPO, XPO, Nash-MD, SPIN and A*-PO
beside another model's answers, ReMax beside greedy ones, OTB, and RLOO to compare with: two-digit sums by the quickstart's model,
by the real command line.

    python benchmarks/preferences.py                        # ten algorithms, three seeds each: an hour
    python benchmarks/preferences.py --only rloo --only remax --only otb
    python benchmarks/preferences.py --only cpo --seeds 0
    python benchmarks/preferences.py --only xpo --out runs/ray --runtime ray --ray.num-cpus 2    # other flags go to rlhf train

Made rows are sums of the training split: the right answer, and that of somebody who forgets to carry, or adds one too much.
Prints pass@1 over 1,500 held-out sums before and after, and leaves with 1 unless every run ends above its start.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rlhf_host.data.arithmetic import split_problems
from rlhf_host.models.locations import find_model

ONLINE = ("--n", "4", "--batch-size", "32", "--max-new-tokens", "4", "--reward", "math_verifier", "--data", "arithmetic")
SETTINGS = {
    "rloo": ("--algo", "rloo", *ONLINE, "--lr", "3e-4"),
    "rloo:dro": ("--algo", "rloo", "--algo.loss", "dro", *ONLINE, "--lr", "3e-4"),
    "remax": ("--algo", "remax", "--agent", "remax", *ONLINE, "--lr", "3e-4"),
    "otb": ("--algo", "otb", *ONLINE, "--lr", "3e-4"),
    "cpo": ("--algo", "cpo", "--batch-size", "32", "--lr", "3e-4"),
    "dro_v": ("--algo", "dro_v", "--batch-size", "32", "--lr", "3e-4", "--critic.lr", "1e-3"),
    "online_dpo": ("--algo", "online_dpo", *ONLINE, "--lr", "3e-4"),
    "xpo": ("--algo", "xpo", "--agent", "xpo", *ONLINE, "--lr", "3e-4"),
    "nash_md": ("--algo", "nash_md", "--agent", "nash_md", "--algo.preference", "order", *ONLINE, "--lr", "2e-4"),
    "spin": ("--algo", "spin", "--agent", "spin", "--algo.nll-coef", "1", *ONLINE, "--lr", "3e-4"),
    "a2po": ("--algo", "a2po", "--agent", "a2po", "--algo.beta", "0.1", *ONLINE, "--lr", "3e-4"),
}
QUIET = ("--checkpoint.every", "0", "--trajectories.every", "0", "--trajectories.show", "0", "--train.threads", "1")


def pairs() -> list[dict[str, str]]:
    """Returns a right and a wrong answer for each sum of the training split."""
    rows = []
    for prompt, answer in split_problems(2, "+", 1500)[0]:
        a, b = map(int, prompt[:-1].split("+"))
        wrong = a + b - 10 if a % 10 + b % 10 >= 10 else a + b + 1
        rows.append({"prompt": prompt, "chosen": answer, "rejected": str(wrong)})
    return rows


def rated() -> list[dict[str, object]]:
    """Returns the same answers one by one, with rewards 1 and 0."""
    return [
        {"prompt": row["prompt"], "completion": row[name], "reward": reward}
        for row in pairs()
        for name, reward in (("chosen", 1.0), ("rejected", 0.0))
    ]


MADE = {"cpo": pairs, "dro_v": rated}


def rlhf(*arguments: str) -> str:
    """Runs a command and returns what it printed; ends with what it said if it failed."""
    command = [sys.executable, "-m", "rlhf_host.cli.main", *arguments]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr or done.stdout)
    return done.stdout


@functools.cache
def accuracy(model: str) -> float:
    """Returns pass@1 over the held-out sums."""
    asked = ("--model", model, "--eval.data", "arithmetic", "--reward", "math_verifier", "--max-new-tokens", "4", "--json")
    return float(json.loads(rlhf("eval", *asked))["eval/pass@1"])


def train(name: str, seed: int, steps: int, out: Path, flags: list[str]) -> dict[str, Any]:
    """Returns pass@1 before and after one run with these further flags, and its seconds per step."""
    run, start = out / f"{name.replace(':', '-')}-{steps}-{seed}", find_model("quickstart").path
    offline = name in MADE
    if not (run / "model").is_dir():
        data = ("--eval.data", "arithmetic", "--eval.every", str(steps))
        if offline:
            file = out / f"{name}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in MADE[name]()))
            data = ("--data", str(file))
        common = ("--model", start, "--steps", str(steps), "--seed", str(seed), "--run-dir", str(run))
        rlhf("train", *SETTINGS[name], *data, *common, *QUIET, *flags)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = [line["eval/pass@1"] for line in lines if "eval/pass@1" in line]
    before, after = (accuracy(start), accuracy(str(run / "model"))) if offline else (measured[0], measured[-1])
    pace = statistics.median(line["time/step"] for line in lines if "time/step" in line)
    return {"before": before, "after": after, "pace": pace}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", action="append", choices=list(SETTINGS), help="repeatable")
    parser.add_argument("--out", type=Path, default=Path("runs/preferences"))
    options, flags = parser.parse_known_args()
    options.out.mkdir(parents=True, exist_ok=True)
    good = True
    print("| algorithm | pass@1 before | median after | min | s/step |\n|---|---|---|---|---|")
    for name in options.only or SETTINGS:
        results = [train(name, seed, options.steps, options.out, flags) for seed in options.seeds]
        after, before = [result["after"] for result in results], results[0]["before"]
        good &= min(after) > before
        pace = statistics.median(result["pace"] for result in results)
        print(f"| `{name}` | {before:.3f} | {statistics.median(after):.3f} | {min(after):.3f} | {pace:.2f} |", flush=True)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
