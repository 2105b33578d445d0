"""Supervised fine-tuning, a reward model, then PPO and DPO, one after the other, on sums.

    python examples/chain.py [--model DIR] [--output DIR] [--threads N]

The model first learns to answer sums, half of them in a sentence. The reward model learns from pairs that people like sentences.
PPO then follows the reward model; DPO follows the pairs themselves. Every model answers the same 200 sums, which no stage has
seen. The table shows how many answers are right, and how many are right and a sentence. The default model is what
``make smollm2`` makes.
"""

import argparse
import random
import time
from pathlib import Path

import rlhf_host

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
parser.add_argument("--output", default="runs/chain", type=Path, help="a directory for the runs")
parser.add_argument("--threads", default=0, type=int, help="CPU threads; 0: torch's default")
parser.add_argument("--short", action="store_true", help="two steps of every stage: shows only that it runs")
options = parser.parse_args()

dice = random.Random(0)
SUMS = [(a, b) for a in range(2, 40) for b in range(2, 40)]
dice.shuffle(SUMS)
HELD_OUT, SUPERVISED, JUDGED, SAMPLED = SUMS[:200], SUMS[200:712], SUMS[712:968], SUMS[968:]


def question(a, b):
    return f"{a} + {b} ="


def number(total):
    return f" {total}"


def sentence(total):
    return f" {total}, I think."


chats = [{"prompt": question(a, b), "completion": dice.choice([number, sentence])(a + b)} for a, b in SUPERVISED]
pairs = [{"prompt": question(a, b), "chosen": sentence(a + b), "rejected": number(a + b)} for a, b in JUDGED + HELD_OUT]
prompts = [{"prompt": question(a, b), "label": str(a + b)} for a, b in SAMPLED]
held_out = [{"prompt": question(a, b), "label": str(a + b)} for a, b in HELD_OUT[: 8 if options.short else None]]


def right(text, label):
    return text.strip() in (label, f"{label}, I think.")


def liked(text, label):
    return text == sentence(label)


def stage(name, algo, model, data, lr, batch_size, **more):
    """A training run."""
    train = {"batch_size": batch_size, "threads": options.threads} | more.pop("train", {})
    if options.short:
        train |= {"batch_size": 4, "steps": 2}
        more.pop("data.epochs", None)
    settings = {"actor": {"lr": lr}, "checkpoint": {"every": 0}, "data.template": "none", "eval.data.template": "none"} | more
    return rlhf_host.train(algo=algo, model=model, data=data, train=train, run_dir=str(options.output / name), **settings)


def judge(model):
    """The shares of held-out sums with right answers, and with right answers in a sentence."""
    settings = {"eval": {"temperature": 0.0, "max_new_tokens": 8}, "eval.data.template": "none", "data.template": "none"}
    metrics = rlhf_host.evaluate(model=model, rewards={"right": right, "liked": liked}, data=held_out, **settings)
    return [metrics[f"eval/{name}"] for name in ("reward/right", "reward/liked")]


table, started = [], time.perf_counter()


def note(name, *values):
    table.append(f"{name:<16}{time.perf_counter() - started:>6.0f} s  " + "  ".join(values))


def shares(model):
    return [f"{what} {share:.3f}" for what, share in zip(("right", "and liked"), judge(model), strict=True)]


note("as it came", *shares(options.model))
sft = stage("sft", "sft", options.model, chats, lr=2e-5, batch_size=16, **{"data.epochs": 2.0})
note("sft", *shares(sft.model))
rm = stage("rm", "rm", sft.model, pairs[: len(JUDGED)], lr=1e-5, batch_size=16, eval_data=pairs[len(JUDGED) :])
note("rm", *(f"{when} {rm.metrics[row]['eval/accuracy']:.3f}" for when, row in (("pairs in order: before", 0), ("after", -1))))
ppo = stage(
    "ppo",
    "ppo",
    sft.model,
    prompts,
    lr=2e-6,
    batch_size=32,
    rewards={"rm": {"name": "reward_model", "model": str(rm.model), "normalize": "running"}},
    rollout={"n": 4, "max_new_tokens": 8},
    train={"steps": 16},
)
note("ppo", *shares(ppo.model))
dpo = stage("dpo", "dpo", sft.model, pairs[: len(JUDGED)], lr=2e-6, batch_size=16)
note("dpo", *shares(dpo.model))
print("\n" + "\n".join(table))
