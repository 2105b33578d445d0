"""Compares algorithms at their first update: cosines between their gradients, on the same answers.

    python benchmarks/first_updates.py              # 16 sums × 8 answers by the quickstart's model: a minute

The answers are sampled once, by the policy that is trained. Each algorithm makes one update on them, by SGD with the rate 1 and
no clipping, so that what the weights move by is the gradient. Prints a table with a line for each algorithm.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from rlhf_samples import rollout
from transformers import AutoModelForCausalLM

import rlhf_host
from rlhf_host.models.locations import find_model

ALGORITHMS = (
    *("reinforce_pp", "ppo", "grpo", "gdpo", "luspo", "vespo", "gmpo", "rloo", "opo", "reinforce_pp_baseline"),
    *("dr_grpo", "maxrl", "raft"),
)
BESIDE = ("reinforce_pp", "grpo", "rloo")


def weights(model: str | Path) -> torch.Tensor:
    """Returns all weights of a model as one vector."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return torch.cat([weight.detach().flatten() for weight in loaded.parameters()]).double()


def update(algo: str, answers: Path, prompts: int, samples: int, run_dir: Path) -> torch.Tensor:
    """Returns what one update by the algorithm adds to the weights."""
    run = rlhf_host.train(
        algo=algo,
        from_trajectories=answers,
        model="quickstart",
        lr=1.0,
        steps=1,
        batch_size=prompts,
        n=samples,
        max_new_tokens=4,
        actor={"max_grad_norm": 0.0},
        backend={"name": "torch", "optimizer": "SGD"},
        kernels="none",
        trackers=[],
        run_dir=run_dir,
        train={"threads": 1},
    )
    return weights(run.model) - weights(find_model("quickstart").path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder, "answers.jsonl")
        sampled = rollout(
            output=answers,
            rewards="math_verifier",
            model="quickstart",
            data="arithmetic",
            batch_size=options.prompts,
            n=options.samples,
            max_new_tokens=4,
            seed=options.seed,
        )
        moved = {algo: update(algo, answers, options.prompts, options.samples, Path(folder, algo)) for algo in ALGORITHMS}
    lengths = [row.action_length for row in sampled]
    right = sum(row.reward or 0.0 for row in sampled)
    print(f"{len(sampled)} answers, {right:g} right, of {min(lengths)} to {max(lengths)} tokens")
    print("| first update of | size | " + " | ".join(f"beside `{name}`" for name in BESIDE) + " |")
    print("|---|---|" + "---|" * len(BESIDE))
    for algo, step in moved.items():
        cosines = [float(torch.cosine_similarity(step, moved[other], dim=0)) for other in BESIDE]
        print(f"| `{algo}` | {float(step.norm()):.2f} | " + " | ".join(f"{cosine:.3f}" for cosine in cosines) + " |")


if __name__ == "__main__":
    main()
