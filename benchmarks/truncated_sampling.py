"""Truncated sampling: what the trainer makes of it with and without the tokens that could be drawn, and whether it learns.

    python benchmarks/truncated_sampling.py                                  # the quickstart's model: a minute
    python benchmarks/truncated_sampling.py --model models/SmolLM2-135M-Instruct --rows 8 --tokens 48
    python benchmarks/truncated_sampling.py --curves                         # three ways, three seeds each: some ten minutes

The engine samples in float32. ``naive`` is the softmax over the whole vocabulary, ``recomputed`` one over the tokens that the
trainer's own pass would leave, computed in bfloat16 as trainers on GPUs do, and ``replay`` one over those that the engine left.
``log ratio`` is the mean |log pi - log mu| over tokens, before any update. ``gradient`` is the distance of the gradient of
``sum(A log pi)``, with random advantages, from that in float64, relative to its length; ``out`` is the share of sampled tokens that
could not be drawn. Then the sizes of the sets, and their bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_host.data.arithmetic import split_problems
from rlhf_host.engines.plain_path import PlainKernels
from rlhf_host.engines.sampling import Sampler
from rlhf_host.engines.transformers import Transformers
from rlhf_host.models.locations import find_model
from rlhf_host.models.passes import Passes
from rlhf_host.protocols import EngineStart
from rlhf_host.records.episodes import Sampling
from rlhf_host.records.token_sets import SUPPORT, pack_tokens, support_trace, unpack_tokens
from rlhf_host.runtimes.compute import Inline

WAYS: dict[str, dict[str, Any]] = {"top-p 0.9": {"top_p": 0.9}, "top-k 8": {"top_k": 8}, "min-p 0.1": {"min_p": 0.1}}
TEXTS = (
    "The capital of France is",
    "Once upon a time",
    "To boil an egg,",
    "My favourite colour is",
    "In 1969,",
    "She said that",
)
CURVES = {"RLOO": (), "RLOO, top-p 0.9": ("--rollout.top-p", "0.9"), "RLOO, top-k 8": ("--rollout.top-k", "8")}
QUIET = ("--checkpoint.every", "0", "--trajectories.every", "0", "--trajectories.show", "0", "--train.threads", "1")


async def sample(model, tokenizer, prompts, sampling):
    """One answer to each prompt, of the host's own engine."""
    start = EngineStart(model=model, tokenizer=tokenizer, version=0, compute=Inline(), kernels=PlainKernels())
    engine = Transformers(Transformers.Options()).start(start)
    engine.expect(len(prompts))
    return await asyncio.gather(*(engine.generate(ids, sampling, (0, row)) for row, ids in enumerate(prompts)))


def reference(model, prompts, ids, mask, sets, advantages) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities in float64, row by row, each token's out of the sum over its own set; and the gradient."""
    wide = copy.deepcopy(model).double()
    logprobs = torch.zeros(ids.shape, dtype=torch.float64)
    for row, prompt in enumerate(prompts):
        own = ids[row, mask[row]]
        logits = wide(torch.tensor([[*prompt, *own.tolist()]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        values = [
            line[token] - line[torch.from_numpy(unpack_tokens(one).astype(np.int64))].logsumexp(0)
            for token, line, one in zip(own, logits, sets[row], strict=True)
        ]
        (torch.stack(values).sum() * advantages[row]).backward()
        logprobs[row, mask[row]] = torch.stack(values).detach()
    return logprobs, flat(wide)


def flat(model) -> torch.Tensor:
    found = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found


def recomputed(model, prompts, ids, mask, sampling) -> list[list[bytes]]:
    """The sets that a trainer's own pass in bfloat16 leaves."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = Passes(model, autocast=torch.bfloat16).forward(prompts, ids, mask, outputs=frozenset({"logits"})).logits
    sets = []
    for row, own in zip(logits, mask, strict=True):
        sampler = Sampler([sampling] * int(own.sum()), torch.device("cpu"))
        sampler.draw(row[own].float(), torch.full((int(own.sum()),), 0.5, dtype=torch.float64))
        sets.append([pack_tokens(each.nonzero()[:, 0].numpy()) for each in sampler.support])
    return sets


def compare(model, tokenizer, prompts, tokens: int) -> None:
    print("| way | log ratio: naive | recomputed | replay | gradient: naive | recomputed | replay | out |")
    print("|---|---|---|---|---|---|---|---|")
    sizes = []
    for way, truncation in WAYS.items():
        sampling = Sampling(tokens, support=True, **truncation)
        answers = asyncio.run(sample(model, tokenizer, prompts, sampling))
        width = max(len(answer.token_ids) for answer in answers)
        ids, drawn = torch.zeros(len(answers), width, dtype=torch.int64), torch.zeros(len(answers), width, dtype=torch.float64)
        mask = torch.arange(width) < torch.tensor([len(answer.token_ids) for answer in answers])[:, None]
        for row, answer in enumerate(answers):
            ids[row, mask[row]], drawn[row, mask[row]] = torch.tensor(answer.token_ids), torch.tensor(answer.logprobs).double()
        told = [[*answer.traces[SUPPORT][len(ids_) - 1 :]] for ids_, answer in zip(prompts, answers, strict=True)]
        advantages = torch.randn(len(answers), generator=torch.Generator().manual_seed(0))
        _, wanted = reference(model, prompts, ids, mask, told, advantages)
        own = recomputed(model, prompts, ids, mask, sampling)
        out = [[int(token) not in unpack_tokens(one) for token, one in zip(*row, strict=True)] for row in zip((
            line[real].tolist() for line, real in zip(ids, mask, strict=True)), own, strict=True)]  # fmt: skip
        some = torch.zeros_like(mask)
        for row, outs in enumerate(out):  # -1e30 would be the mean
            some[row, mask[row]] = ~torch.tensor(outs)
        ratios, gradients = [], []
        for sets, counted in ((None, mask), (own, some), (told, mask)):
            traces = None if sets is None else [support_trace(len(p), row) for p, row in zip(prompts, sets, strict=True)]
            logprobs = Passes(model).forward(prompts, ids, mask, traces=traces).logprobs
            (logprobs * counted * advantages[:, None]).sum().backward()
            gradients.append(float((flat(model) - wanted).norm() / wanted.norm()))
            ratios.append(float((logprobs.detach().double() - drawn)[counted].abs().mean()))
        gone = float(np.mean(np.concatenate(out)))
        print(f"| {way} | {' | '.join(f'{value:.1e}' for value in (*ratios, *gradients))} | {gone:.2%} |", flush=True)
        every = [one for row in told for one in row]
        counts, lengths = [len(unpack_tokens(one)) for one in every], [len(one) for one in every]
        sizes.append((way, counts, lengths))
    print("\n| way | tokens in a set: mean | median | largest | bytes per token: mean | largest | a bit for each token |")
    print("|---|---|---|---|---|---|---|")
    for way, counts, lengths in sizes:
        told = f"{np.mean(counts):.1f} | {np.median(counts):.0f} | {max(counts)} | {np.mean(lengths):.1f} | {max(lengths)}"
        print(f"| {way} | {told} | {-(-model.config.vocab_size // 8)} |")


def train(way: str, seed: int, steps: int, every: int, out: Path) -> dict[str, Any]:
    """Returns the curve of one run, its largest mismatch and its mean sets."""
    run = out / f"{way.replace(', ', '-').replace(' ', '-')}-{seed}"
    if not (run / "model").is_dir():
        flags = ["--algo", "rloo", "--reward", "math_verifier", "--model", "quickstart", "--data", "arithmetic", "--n", "4"]
        flags += [
            "--batch-size",
            "32",
            "--lr",
            "3e-4",
            "--eval.data",
            "arithmetic",
            "--max-new-tokens",
            "5",
            "--seed",
            str(seed),
        ]
        flags += ["--eval.every", str(every), "--steps", str(steps), *QUIET, *CURVES[way], "--run-dir", str(run)]
        command = [sys.executable, "-m", "rlhf_host.cli.main", "train", *flags]
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr or done.stdout)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "mismatch/max" in row]
    return {
        "curve": {row["step"]: row["eval/pass@1"] for row in rows if "eval/pass@1" in row},
        "mismatch": max(row["mismatch/max"] for row in trained),
        "size": statistics.fmean(row.get("support/size", float("nan")) for row in trained),
        "bytes": statistics.fmean(row.get("support/bytes", float("nan")) for row in trained),
    }


def curves(ways: Sequence[str], seeds: list[int], steps: int, every: int, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    points = range(0, steps + 1, every)
    print(f"| run | {' | '.join(f'step {step}' for step in points)} | largest mismatch | tokens in a set | bytes |")
    print(f"|---{'|---' * len(points)}|---|---|---|")
    for way in ways:
        found = [train(way, seed, steps, every, out) for seed in seeds]
        cells = []
        for step in points:
            values = [one["curve"][step] for one in found]
            error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
            cells.append(f"{statistics.fmean(values):.3f} ± {error:.3f}")
        told = [statistics.fmean(one[name] for one in found) for name in ("size", "bytes")]
        worst = max(one["mismatch"] for one in found)
        print(f"| {way} | {' | '.join(cells)} | {worst:.1e} | {told[0]:.1f} | {told[1]:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", default="quickstart")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=5)
    parser.add_argument("--curves", action="store_true", help="train instead")
    parser.add_argument("--only", action="append", choices=list(CURVES), help="of --curves; repeatable")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--out", type=Path, default=Path("runs/truncated-sampling"))
    options = parser.parse_args()
    if options.curves:
        curves(options.only or list(CURVES), options.seeds, options.steps, options.every, options.out)
        return
    path = find_model(options.model).path
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(),
        AutoTokenizer.from_pretrained(path),
    )
    texts = [prompt for prompt, _ in split_problems(2, "+", 500)[0]] if options.model == "quickstart" else TEXTS
    prompts = [tuple(tokenizer(texts[row % len(texts)]).input_ids) for row in range(options.rows)]
    compare(model, tokenizer, prompts, options.tokens)


if __name__ == "__main__":
    main()
