"""SDPO beside RLOO where both can learn: two-digit sums, and a model that copies a hint in front of a sum.

    python benchmarks/self_distillation.py                  # four variants, three seeds each: a quarter of an hour
    python benchmarks/self_distillation.py --seeds 0 --steps 20

The quickstart's model first learns from rows, by ``--algo sft``: half of them are plain sums in which it forgets 85 % of the
carries, as it does, and half have a number in front that is to be copied, whatever the sum. So the model knows no more of sums than
before, and can read a solution: what SDPO's teacher is shown. Prints pass@1 over 1,500 held-out sums every 20 steps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_host.data.arithmetic import split_problems
from rlhf_host.models.locations import find_model

FORGOTTEN = 0.85
WORDS = ("--algo.template", "{solution} {prompt}", "--algo.solution-template", "{solution}", "--algo.feedback", "never")
SDPO = ("--algo", "sdpo", *WORDS)
VARIANTS = {
    "rloo": ("--algo", "rloo"),
    "sdpo, its own teacher": (*SDPO, "--algo.signal", "full", "--algo.beta", "0.5", "--algo.teacher-share", "1"),
    "sdpo, an average": (*SDPO, "--algo.signal", "full", "--algo.beta", "0.5"),
    "sdpo and grpo": (*SDPO, "--algo.signal", "full", "--algo.beta", "0.5", "--algo.alpha", "0.5"),
}
LR = "3e-4"


def rows(seed: int = 0) -> list[dict[str, str]]:
    """Returns plain sums, and as many with a number to copy."""
    draw, found = random.Random(seed), []
    for prompt, answer in split_problems(2, "+", 1500)[0]:
        a, b = map(int, prompt[:-1].split("+"))
        carries = a % 10 + b % 10 >= 10
        forgets = carries and draw.random() < FORGOTTEN
        found.append({"prompt": prompt, "completion": str(a + b - 10) if forgets else answer})
        hint = str(draw.randrange(20, 199))
        found.append({"prompt": f"{hint} {prompt}", "completion": hint})
    draw.shuffle(found)
    return found


def rlhf(*arguments: str) -> None:
    """Runs a command; raises what it said if it failed."""
    command = [sys.executable, "-m", "rlhf_host.cli.main", *arguments]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr or done.stdout)


def prepared(out: Path) -> Path:
    """Returns the model that copies hints, trained by the first call."""
    model = out / "hinted/model"
    if not model.is_dir():
        print("Teaching the model to copy a hint (once): half a minute", flush=True)
        data = out / "hints.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows()))
        settings = ("--steps", "300", "--batch-size", "128", "--lr", "1e-3", "--model", find_model("quickstart").path)
        rlhf("train", "--algo", "sft", "--data", str(data), *settings, "--run-dir", str(out / "hinted"))
    return model


def curve(out: Path, name: str, model: Path, seed: int, steps: int) -> list[float]:
    """Returns pass@1 every 20 steps of one run."""
    run = out / f"{name.replace(', ', '-').replace(' ', '-')}-{steps}-{seed}"
    if not (run / "model").is_dir():
        sampled = ("--data", "arithmetic", "--eval.data", "arithmetic", "--reward", "math_verifier", "--n", "8")
        size = ("--batch-size", "32", "--max-new-tokens", "4", "--steps", str(steps), "--lr", LR, "--eval.every", "20")
        rlhf("train", *VARIANTS[name], *sampled, *size, "--model", str(model), "--seed", str(seed), "--run-dir", str(run))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["eval/pass@1"] for line in lines if "eval/pass@1" in line]


def table(out: Path, model: Path, seeds: Sequence[int], steps: int) -> str:
    """Returns the median curve of each variant in Markdown, with the lowest and highest end."""
    lines = [f"| | {' | '.join(f'step {step}' for step in range(0, steps + 1, 20))} | ends |"]
    lines.append("|---" * (steps // 20 + 3) + "|")
    for name in VARIANTS:
        curves = [curve(out, name, model, seed, steps) for seed in seeds]
        medians = " | ".join(f"{statistics.median(values):.3f}" for values in zip(*curves, strict=True))
        ends = [values[-1] for values in curves]
        lines.append(f"| {name} | {medians} | {min(ends):.3f} to {max(ends):.3f} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("runs/self-distillation"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    print(table(options.out, prepared(options.out), options.seeds, options.steps))


if __name__ == "__main__":
    main()
