"""The embedded engine: its speed beside ``generate`` of transformers, and its log-probabilities beside the trainer's."""

from __future__ import annotations

import asyncio
import statistics
from itertools import pairwise
from typing import Any

import torch

from gpu_parts.machine import Machine, random_model, random_rows, watched, worker_of
from rlhf_host.config.schema import TrainConfig
from rlhf_host.engines.plain_path import PlainKernels
from rlhf_host.engines.transformers import Transformers
from rlhf_host.protocols import Engine, EngineStart
from rlhf_host.records.episodes import Generation, Sampling
from rlhf_host.runtimes.compute import Inline
from rlhf_host.weight_sync.verify import NEW_TOKENS, ROUGH_TOLERANCE

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
SPREAD = 5.0
"""Factor of the last norm, so that logits are as far apart as a trained model's, and are rounded as coarsely."""


def speed(machine: Machine) -> tuple[float, dict[str, Any]]:
    """Tokens per second over those of ``generate``; the same float32 weights under bfloat16 autocast."""
    model = random_model(machine)
    prompts, samples, new = machine.size(16, 2), machine.size(8, 2), machine.size(128, 4)
    prompt_ids = random_rows(model, prompts * samples, machine.size(256, 8), 1, group=samples).prompt_ids
    engine, ids = _engine(model, len(prompt_ids)), torch.tensor(prompt_ids, device=machine.device)
    lengths = {"max_new_tokens": new, "min_new_tokens": new}
    seconds: dict[str, list[float]] = {"engine": [], "generate": []}
    for number in range(machine.size(4, 2)):
        engine.set_version(number)  # as after a training step
        with watched(machine) as ours:
            _sample(engine, prompt_ids, new)
        with watched(machine) as theirs, torch.autocast(machine.device.type, torch.bfloat16):
            model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, pad_token_id=0, **lengths)
        if number:
            seconds["engine"].append(ours.seconds)
            seconds["generate"].append(theirs.seconds)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    rates = {f"{name}_tokens_per_s": len(prompt_ids) * new / median for name, median in medians.items()}
    return medians["generate"] / medians["engine"], rates


def mismatch(machine: Machine) -> tuple[float, dict[str, Any]]:
    """Largest |log π of the sampler − log π of the trainer|, in nats, both in bfloat16."""
    model = random_model(machine)
    with torch.no_grad():
        model.model.norm.weight.mul_(SPREAD)
    count, new = machine.size(128, 4), machine.size(256, 8)
    rows = random_rows(model, count, machine.size(256, 8), new, group=machine.size(8, 2))
    answers = _sample(_engine(model, count), rows.prompt_ids, new)
    rows.completion_ids = torch.tensor([answer.token_ids for answer in answers])
    sampled = torch.tensor([answer.logprobs for answer in answers])
    trained = worker_of(model, TrainConfig(autocast="bfloat16")).outputs("actor", "logprobs", rows)
    gaps = (sampled - trained).abs().double()
    edges = [0.0, *(10.0**power for power in range(-5, 1)), float("inf")]
    counts = [int(((gaps >= low) & (gaps < high)).sum()) for low, high in pairwise(edges)]
    return float(gaps.max()), {
        "tolerance_of_the_probe": ROUGH_TOLERANCE,
        "largest_mean_of_a_probe": float(gaps.unfold(1, NEW_TOKENS, NEW_TOKENS).mean(-1).max()),
        "mean": float(gaps.mean()),
        **{name: float(gaps.flatten().quantile(part)) for name, part in QUANTILES.items()},
        "histogram": dict(zip(["below 1e-5", *(f"from {edge:.0e}" for edge in edges[1:-1])], counts, strict=True)),
        "mean_logprob": float(trained.mean()),
        "tokens": gaps.numel(),
    }


def _engine(model: Any, rows: int) -> Engine:
    start = EngineStart(model=model, tokenizer=None, version=0, compute=Inline(), kernels=PlainKernels())
    return Transformers(Transformers.Options(max_batch_size=rows, autocast="bfloat16")).start(start)


def _sample(engine: Engine, prompts: list[list[int]], new: int) -> list[Generation]:
    async def all_of_them() -> list[Generation]:
        engine.expect(len(prompts))
        requests = (engine.generate(ids, Sampling(new), (0, number)) for number, ids in enumerate(prompts))
        return await asyncio.gather(*requests)

    return asyncio.run(all_of_them())
