"""Loops over a trainable session beside ``rlhf train``: weights after four steps, bit for bit, with a save in the middle.

    python benchmarks/session_equality.py [--only rloo,ray-fsdp,lora] [--work DIR]

Each row is a run and a session of its own with the same settings. The session saves after two steps and goes on, and a new process
loads that state and takes the last two steps. ``continued`` and ``loaded`` count the weights in which one of them differs from the
run in any bit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

STEPS = 4
ALGORITHMS: dict[str, dict[str, Any]] = {
    "rloo": {"algo": "rloo"},
    "grpo": {"algo": "grpo", "extensions": {"kl": {"name": "kl", "coef": 0.05, "place": "loss"}}},
    "ppo": {"algo": "ppo"},
    "dpo": {"algo": "dpo"},
}
PLACED = {"runtime": "ray", "placement": ["actor=2", "rollout=1"], "ray.num_cpus": 4}
PLACES: dict[str, dict[str, Any]] = {
    "local": {},
    "ray-torch": {**PLACED, "backend": {"name": "torch"}},
    "ray-fsdp": {**PLACED, "backend": {"name": "fsdp"}},
    "ray-zero2": {**PLACED, "backend": {"name": "deepspeed", "zero_stage": 2}},
}
WEIGHTS: dict[str, dict[str, Any]] = {"all": {}, "lora": {"lora": {"rank": 4}}}
Shape = tuple[str, str, str]


def vowels(text: str, label: Any) -> float:
    return sum(char in "aeiou" for char in text) / 8


def settings(shape: Shape, model: Path) -> dict[str, Any]:
    algo, place, weights = shape
    common = {**ALGORITHMS[algo], **PLACES[place], "model": model, "lr": 1e-2, "steps": STEPS, "batch_size": 4}
    common |= {"actor": {"warmup_steps": 0, **WEIGHTS[weights]}, "train": {"threads": 1}, "kernels": "none"}
    if algo == "dpo":
        if place != "local":  # nothing samples
            common["placement"] = ["actor=2"]
        return {
            **common,
            "data": [{"prompt": f"{i}+{i}=", "chosen": str(2 * i), "rejected": str(2 * i + 1)} for i in range(16)],
        }
    rows = [{"prompt": f"{i}+{i}=", "label": str(2 * i)} for i in range(16)]
    return {**common, "data": rows, "rewards": vowels, "n": 4, "max_new_tokens": 8}


def steps(session: Any, count: int) -> None:
    for _ in range(count):
        session.forward_backward(session.draw())
        session.optim_step()
        session.sync()


def loaded(shape: Shape, work: Path) -> None:
    """Is the new process."""
    import rlhf_host

    with rlhf_host.trainable_session(**settings(shape, work / "tiny")) as session:
        session.load(work / "half")
        assert session.step == STEPS // 2
        steps(session, STEPS - session.step)
        session.save(work / "loaded")


def differing(ours: Path, theirs: Path) -> str:
    """Returns in how many of how many weights two models differ."""
    import torch
    from safetensors.torch import load_file

    left, right = (
        {key: weight for file in each.glob("*.safetensors") for key, weight in load_file(file).items()}
        for each in (ours, theirs)
    )
    assert left.keys() == right.keys()
    return f"{sum(not torch.equal(left[key], right[key]) for key in right)} of {len(right)}"


def compare(shape: Shape, work: Path) -> dict[str, Any]:
    from rlhf_authoring.models import write_tiny_model

    import rlhf_host

    write_tiny_model(work / "tiny")
    begin = time.monotonic()
    run = rlhf_host.train(run_dir=work / "run", **settings(shape, work / "tiny"))
    with rlhf_host.trainable_session(**settings(shape, work / "tiny")) as session:
        start = session.save(work / "start") / "model"
        steps(session, STEPS // 2)
        session.save(work / "half")
        steps(session, STEPS - STEPS // 2)
        whole = session.save(work / "whole") / "model"
    subprocess.run([sys.executable, __file__, "--loaded", *shape, "--work", work], check=True, stdout=subprocess.DEVNULL)
    again = work / "loaded" / "checkpoints" / f"step-{STEPS:06d}" / "model"
    found = {"moved": differing(start, run.model), "continued": differing(whole, run.model)}
    return {**found, "loaded": differing(again, run.model), "seconds": round(time.monotonic() - begin)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of algorithms, places and weights; default: all")
    parser.add_argument("--work", type=Path, help="directory; default: a new one")
    parser.add_argument("--loaded", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    work = asked.work or Path(mkdtemp(prefix="session-equality-"))
    if asked.loaded:
        return loaded(tuple(asked.loaded), work)
    if asked.one:
        (work / "found.json").write_text(json.dumps(compare(tuple(asked.one), work)))
        return None
    only = set(asked.only.split(",")) - {""}
    print(
        f"{'algorithm':<10} {'place':<10} {'weights':<8} {'differ from the start':>22} {'continued':>10} {'loaded':>10} seconds"
    )
    chosen = [[name for name in names if name in only] or names for names in (ALGORITHMS, PLACES, WEIGHTS)]
    for shape in itertools.product(*chosen):
        own = work / "-".join(shape)
        own.mkdir(parents=True)
        with open(own / "log", "wb") as log:
            done = subprocess.run([sys.executable, __file__, "--one", *shape, "--work", own], stdout=log, stderr=log)
        head = "{:<10} {:<10} {:<8}".format(*shape)
        if done.returncode:
            print(f"{head} failed: {own / 'log'}", flush=True)
            continue
        found = json.loads((own / "found.json").read_text())
        print(f"{head} {found['moved']:>22} {found['continued']:>10} {found['loaded']:>10} {found['seconds']:>7}", flush=True)


if __name__ == "__main__":
    main()
