"""Rollouts from weights in 8 bits: how far vLLM samples from the trainer, and whether RLOO learns so, with and without TIS.

    python benchmarks/quantized_rollouts.py                        # the table of mismatches: a minute
    python benchmarks/quantized_rollouts.py --curves               # two-digit sums, three seeds each: some 20 minutes
    python benchmarks/quantized_rollouts.py --curves --only int8 --seeds 0 --steps 10

The table: the quickstart's model in vLLM on a CPU, after a sync, before the next one and after it. Meanwhile every weight of the
trainer moved by ``--move``. |log pi - log mu| over sampled tokens, mean and largest; and whether both proofs of a sync notice what
log-probabilities do not show: one bit of one weight that changed on its way, and one layer that keeps its old weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

import rlhf_host
from rlhf_host.backends.weights import named_weights
from rlhf_host.distributed.sync.plugin import IPC
from rlhf_host.distributed.vllm.plugin import Vllm
from rlhf_host.engines.plain_path import PlainKernels
from rlhf_host.errors import RunError
from rlhf_host.protocols import NO_WEIGHTS, EngineStart, SyncTarget
from rlhf_host.records.episodes import Sampling
from rlhf_host.runtimes.compute import Inline
from rlhf_host.weight_sync.local_source import LocalSource

MODEL = Path(rlhf_host.__path__[0]) / "models/quickstart"
ENGINES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "fp8": {"quantization": "fp8"},
}
TIS = ("--with", "tis")
WAYS = {
    "transformers, float32": ("--engine", "transformers"),
    "vllm, bfloat16": ("--engine", "vllm", "--engine.dtype", "bfloat16"),
    "vllm, int8": ("--engine", "vllm", "--engine.quantization", "int8"),
    "vllm, int8, tis": ("--engine", "vllm", "--engine.quantization", "int8", *TIS),
    "vllm, fp8": ("--engine", "vllm", "--engine.quantization", "fp8"),
    "vllm, fp8, tis": ("--engine", "vllm", "--engine.quantization", "fp8", *TIS),
}
TASK = ("--algo", "rloo", "--reward", "math_verifier", "--model", "quickstart", "--data", "arithmetic")
COMMON = (*TASK, "--n", "4", "--batch-size", "32", "--lr", "3e-4")
QUIET = ("--checkpoint.every", "0", "--trajectories.every", "0", "--trajectories.show", "0", "--train.threads", "1")


def move(model: torch.nn.Module, size: float, seed: int) -> None:
    """Changes every weight by ``size``, up or down."""
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += size * torch.randn(weight.shape, generator=drawn).sign()


async def gaps(engine: Any, model: torch.nn.Module, count: int) -> tuple[float, float]:
    """Returns mean and largest |log pi - log mu| over ``count`` completions of random prompts."""
    draw, vocabulary = random.Random(0), model.config.vocab_size
    prompts = [[draw.randrange(3, vocabulary) for _ in range(60)] for _ in range(count)]
    made = await asyncio.gather(*(engine.generate(prompt, Sampling(32), (7, i, 0)) for i, prompt in enumerate(prompts)))
    found = []
    for prompt, one in zip(prompts, made, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + one.token_ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.double().log_softmax(-1).gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
        found.append((logprobs - torch.tensor(one.logprobs, dtype=torch.float64)).abs())
    each = torch.cat(found)
    return float(each.mean()), float(each.max())


def one_bit_on_the_way(engine: Any, name: str = "model.layers.0.mlp.up_proj.weight") -> None:
    """Changes one bit of one weight, from now on, after it was sent and before it is loaded."""
    load = engine.loader.load

    def altered(buckets: Any) -> Any:
        for bucket in buckets:
            bucket = [(each, tensor.clone()) for each, tensor in bucket]
            for each, tensor in bucket:
                if each == name:
                    tensor.view(torch.int32)[0, 0] ^= 1
            yield bucket

    engine.loader.load = lambda buckets, version: load(altered(buckets), version)


def one_layer_keeps(engine: Any, model: torch.nn.Module, name: str = "model.layers.1.mlp.down_proj") -> None:
    """From now on the layer gets the weights that the model has now, whatever comes."""
    worker = engine.llm.engine_core.engine_core.model_executor.driver_worker.worker
    method = worker.model_runner.get_model().get_submodule(name).quant_method
    old = dict(named_weights(model))[f"{name}.weight"].detach().clone()
    proof = method.process_weights_after_loading
    process, label = proof.args

    def keep(layer: Any) -> None:
        layer.weight.data.copy_(old)
        process(layer)

    method.process_weights_after_loading = partial(proof.func, keep, label)


async def mismatch(name: str, size: float, count: int) -> list[str]:
    """Returns a row of the table."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(MODEL), AutoModelForCausalLM.from_pretrained(MODEL).eval()
    start = EngineStart(model=MODEL, tokenizer=tokenizer, version=NO_WEIGHTS, compute=Inline(), kernels=PlainKernels())
    engine: Any = Vllm(Vllm.Options(**ENGINES[name])).start(start)
    source, sync = LocalSource(model), IPC(IPC.Options())
    try:
        await sync.connect([SyncTarget("vllm", engine)])
        await sync.send(source, 0)
        figures = [*await gaps(engine, model, count)]
        move(model, size, 1)
        figures += await gaps(engine, model, count)
        await sync.send(source, 1)
        figures += await gaps(engine, model, count)
        row = [f"{figure:.1e}" for figure in figures]
        if not engine.options.quantization:
            return [*row, "", ""]
        load = engine.loader.load
        one_bit_on_the_way(engine)
        row.append(await noticed(sync, source, 2, "did not receive the weights of version 2"))
        engine.loader.load = load
        one_layer_keeps(engine, model)
        move(model, size, 2)
        row.append(await noticed(sync, source, 3, "does not multiply with the weights that came"))
        return row
    finally:
        await sync.close()
        await engine.close()


async def noticed(sync: IPC, source: LocalSource, version: int, message: str) -> str:
    try:
        await sync.send(source, version)
    except RunError as error:
        return "noticed" if message in str(error) else str(error)
    return "**not noticed**"


def table(size: float, count: int) -> bool:
    heads = ["after a sync: mean", "max", "before the next: mean", "max", "after it: mean", "max", "one bit", "one layer"]
    print(f"| weights | {' | '.join(heads)} |\n{'|---' * (1 + len(heads))}|")
    rows = []
    for name in ENGINES:
        rows.append(asyncio.run(mismatch(name, size, count)))
        print(f"| {name} | {' | '.join(rows[-1])} |", flush=True)
    return all(row[-1] in ("", "noticed") and row[-2] in ("", "noticed") for row in rows)


def train(way: str, seed: int, steps: int, out: Path) -> dict[str, Any]:
    """Returns pass@1 along one run, and what its steps measured."""
    run = out / f"{way.replace(', ', '-')}-{steps}-{seed}"
    if not (run / "model").is_dir():
        flags = [*COMMON, *WAYS[way], *QUIET, "--eval.data", "arithmetic", "--eval.every", str(max(1, steps // 4))]
        flags += ["--max-new-tokens", "5", "--seed", str(seed), "--steps", str(steps), "--run-dir", str(run)]
        command = [sys.executable, "-m", "rlhf_host.cli.main", "train", *flags]
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr or done.stdout)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["step"]]
    return {
        "curve": [row["eval/pass@1"] for row in rows if "eval/pass@1" in row],
        "mean": statistics.fmean(row["mismatch/mean"] for row in trained),
        "max": max(row["mismatch/max"] for row in trained),
        "cut": statistics.fmean(row.get("correction/truncated", 0.0) for row in trained),
    }


def curves(ways: list[str], seeds: list[int], steps: int, out: Path) -> bool:
    out.mkdir(parents=True, exist_ok=True)
    shares = " | ".join(f"step {round(step * max(1, steps // 4))}" for step in range(5))
    print(f"| run | {shares} | mismatch: mean | max | tokens cut by TIS |\n{'|---' * 9}|")
    good = True
    for way in ways:
        found = [train(way, seed, steps, out) for seed in seeds]
        cells = []
        for passed in zip(*(one["curve"] for one in found), strict=True):
            error = statistics.stdev(passed) / len(passed) ** 0.5 if len(passed) > 1 else 0.0
            cells.append(f"{statistics.fmean(passed):.3f} ± {error:.3f}")
        good &= all(one["curve"][-1] > one["curve"][0] for one in found)
        figures = [statistics.fmean(one["mean"] for one in found), max(one["max"] for one in found)]
        cut = statistics.fmean(one["cut"] for one in found)
        print(f"| {way} | {' | '.join(cells)} | {figures[0]:.1e} | {figures[1]:.1e} | {cut:.2%} |", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--move", type=float, default=1e-5, help="how far each weight moves between two syncs")
    parser.add_argument("--rows", type=int, default=64, help="completions of 32 tokens")
    parser.add_argument("--curves", action="store_true")
    parser.add_argument("--only", action="append", choices=list(WAYS), help="repeatable")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("runs/quantized-rollouts"))
    options = parser.parse_args()
    if options.curves:
        return int(not curves(options.only or list(WAYS), options.seeds, options.steps, options.out))
    return int(not table(options.move, options.rows))


if __name__ == "__main__":
    sys.exit(main())
