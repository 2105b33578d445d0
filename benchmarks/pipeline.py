"""Sampling ahead of training: seconds per step, compared with rollout and training alone, and whether a model learns.

python benchmarks/pipeline.py --json             # environments that take 0.5 s, and training that takes as long
python benchmarks/pipeline.py --case lognormal   # environments of lognormal length
python benchmarks/pipeline.py --case smollm2     # a real model and environments that take 2 s; make smollm2 first
python benchmarks/pipeline.py --case curves      # pass@1 of two-digit sums (half_trained.py) at depths 0, 1 and 4, three seeds

Environments sleep, so two busy cores suffice. Training is repeated until it takes as long as the rollout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import half_trained
from rlhf_authoring import write_tiny_model

import rlhf_host
from rlhf_host import Action, Episode, Needs, Step, hookimpl

STEPS, FIRST = {"fixed": 14, "lognormal": 14, "smollm2": 8}, {"fixed": 4, "lognormal": 4, "smollm2": 3}
"""Steps of a run, and the first that counts: before it the pipeline fills."""
WAIT_S = {"fixed": 0.5, "lognormal": 0.5, "smollm2": 2.0}
SMOLLM2 = Path("models/SmolLM2-135M-Instruct")
SHAPE = 1.0
"""Standard deviation of the logarithm."""


class Waits:
    """One answer, and an environment that takes its time with it. The reward is the share of vowels."""

    def __init__(self, case: str):
        self.case = case

    @hookimpl
    def needs(self) -> Needs:
        return Needs(rewards=False)

    @hookimpl
    def agent_reset(self, episode: Episode) -> Step:
        return Step()

    @hookimpl
    async def agent_step(self, episode: Episode, action: Action) -> Step:
        wait = WAIT_S[self.case]
        if self.case == "lognormal":
            rng = random.Random(f"{episode.seed} {episode.sample}")
            wait *= min(8.0, rng.lognormvariate(-SHAPE * SHAPE / 2, SHAPE))
        await asyncio.sleep(wait)
        return Step(reward=sum(letter in "aeiou" for letter in action.text) / 8, done=True)


def steps(folder: Path, case: str, depth: int, epochs: int) -> dict[str, float]:
    """Means over the steps that count."""
    data = [{"prompt": f"{number}+1=", "label": str(number + 1)} for number in range(64)]
    settings: dict[str, Any] = {"rollout.n": 8, "rollout.max_new_tokens": 4, "train.batch_size": 8, "train.steps": STEPS[case]}
    if case == "smollm2":
        settings |= {"rollout.n": 4, "rollout.max_new_tokens": 16, "train.batch_size": 2}
    settings |= {"train.epochs": epochs, "train.threads": 2 if case == "smollm2" else 1, "trajectories.every": 0}
    settings |= {"checkpoint.final": False}
    settings |= {
        "train.old_logprobs": "sampler",
        "async_depth": depth,
        "kernels": "none",
        "run_dir": str(folder / f"d{depth}-{epochs}"),
    }
    model = SMOLLM2 if case == "smollm2" else folder / "model"
    run = rlhf_host.train(algo="rloo", agent=Waits(case), model=model, data=data, **settings)
    rows = [row for row in run.metrics if row["step"] >= FIRST[case]]
    wall = (rows[-1]["time/wall"] - rows[0]["time/wall"]) / (len(rows) - 1)
    means = {name: statistics.fmean(row[f"time/{name}"] for row in rows) for name in ("rollout", "train", "sync")}
    return means | {"wall": wall, "staleness": max(row.get("staleness/max", 0.0) for row in rows)}


def speed(case: str, depths: Sequence[int]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        write_tiny_model(folder / "model", hidden=128)
        epochs = 1
        if case != "smollm2":
            alone = steps(folder, case, 0, 1)
            epochs = max(1, round(alone["rollout"] / alone["train"]))
        found = {depth: steps(folder, case, depth, epochs) for depth in (0, *depths)}
    rollout, training = found[0]["rollout"], found[0]["train"]
    result: dict[str, Any] = {"case": case, "rollout_s": rollout, "train_s": training, "epochs": epochs}
    for depth, each in found.items():
        result[f"wall_s/{depth}"] = each["wall"]
        result[f"over_max/{depth}"] = each["wall"] / max(rollout, training)
        result[f"over_sum/{depth}"] = each["wall"] / (rollout + training)
        result[f"staleness/{depth}"] = each["staleness"]
        print(
            f"depth {depth}: {each['wall']:.3f} s per step, {result[f'over_max/{depth}']:.2f} of the longer phase", flush=True
        )
    return result


def curves(count: int, seeds: int, rate: float, depths: Sequence[int]) -> dict[str, Any]:
    result: dict[str, Any] = {"case": "curves", "steps": count, "lr": rate}
    for depth in depths:
        for seed in range(seeds):
            with tempfile.TemporaryDirectory() as directory:
                flags = [*half_trained.flags(), "--algo", "rloo", "--reward", "math_verifier", "--run-dir", f"{directory}/run"]
                flags += ["--async-depth", depth, "--seed", seed, "--lr", rate, "--steps", count, "--eval.every", count // 4]
                command = [sys.executable, "-m", "rlhf_host.cli.main", "train", *map(str, flags)]
                done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                if done.returncode:
                    raise SystemExit(done.stderr)
                rows = map(json.loads, Path(directory, "run/metrics.jsonl").read_text().splitlines())
                scores = [row["eval/pass@1"] for row in rows if "eval/pass@1" in row]
            result[f"pass@1/{depth}/{seed}"] = scores
            print(f"depth {depth}, seed {seed}: {' '.join(f'{score:.3f}' for score in scores)}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("fixed", "lognormal", "smollm2", "curves"), default="fixed")
    parser.add_argument("--depths", type=int, nargs="+", default=None, help="1 2 4; of curves: 0 1 4")
    parser.add_argument("--lr", type=float, default=5e-4, help="of curves")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="the last line is a JSON object, with or without it")
    asked = parser.parse_args()
    if asked.case == "curves":
        result = curves(asked.steps, asked.seeds, asked.lr, asked.depths or [0, 1, 4])
    else:
        result = speed(asked.case, asked.depths or [1, 2, 4])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
