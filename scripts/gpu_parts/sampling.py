"""The embedded engine: its speed beside transformers' and the memory's, and its log-probabilities beside the trainer's."""

from __future__ import annotations

import asyncio
import inspect
import statistics
from itertools import pairwise
from typing import Any

import torch

from gpu_parts.machine import GB, Machine, Report, random_model, random_rows, watched, worker_of
from rlhf_host.config.schema import TrainConfig
from rlhf_host.engines.plain_path import PlainKernels
from rlhf_host.engines.transformers import Transformers
from rlhf_host.protocols import Decoder, Engine, EngineStart, Kernels
from rlhf_host.records.episodes import Generation, Sampling
from rlhf_host.runtimes.compute import Inline
from rlhf_host.weight_sync.verify import NEW_TOKENS, ROUGH_TOLERANCE

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
DESTROY = "destroy_cached_continuous_batching_manager"
SPREAD = 5.0
"""Factor of the last norm, so that logits are as far apart as a trained model's, and are rounded as coarsely."""


def speed(machine: Machine, report: Report) -> None:
    """Tokens per second over those of ``generate``, both with float32 weights under bfloat16 autocast; over those of transformers'
    continuous batching with weights in bfloat16, which is how it is fastest; and over what the memory's speed would allow, if a
    step read the weights and the cache once and did nothing else.
    """
    model = random_model(machine)
    prompts, samples, new = machine.size(16, 2), machine.size(8, 2), machine.size(128, 4)
    prompt_ids = random_rows(model, prompts * samples, machine.size(256, 8), 1, group=samples).prompt_ids
    kernels = _NamedDecoders()
    engine, ids = _engine(model, len(prompt_ids), kernels), torch.tensor(prompt_ids, device=machine.device)
    lengths = {"max_new_tokens": new, "min_new_tokens": new}
    seconds: dict[str, list[float]] = {"engine": [], "generate": [], "paged": []}

    def rates(*names: str) -> dict[str, float]:
        return {f"{name}_tokens_per_s": len(prompt_ids) * new / statistics.median(seconds[name]) for name in names}

    def ratio(name: str) -> tuple[float, dict[str, Any]]:
        details = {**rates("engine", name), "decoders": sorted(kernels.names)}
        return statistics.median(seconds[name]) / statistics.median(seconds["engine"]), details

    for number in range(machine.size(3, 2)):
        engine.set_version(number)  # as after a training step
        with watched(machine) as ours:
            _sample(engine, prompt_ids, new)
        with watched(machine) as theirs, torch.autocast(machine.device.type, torch.bfloat16):
            model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, pad_token_id=0, **lengths)
        if number:
            seconds["engine"].append(ours.seconds)
            seconds["generate"].append(theirs.seconds)
            report.so_far(*ratio("generate"), "engine")
    report(*ratio("generate"), "engine")

    step_bytes = _step_bytes(model, len(prompt_ids), len(prompt_ids[0]) + new / 2)
    bandwidth, step_s = _bandwidth(machine), statistics.median(seconds["engine"]) / new
    floor = {"step_ms": 1e3 * step_s, "floor_ms": 1e3 * step_bytes / bandwidth, "gb_per_s": bandwidth / GB}
    report(step_bytes / bandwidth / step_s, {**floor, "gb_a_step": step_bytes / GB}, "engine-floor")

    model.to(torch.bfloat16)
    for number in range(machine.size(3, 2)):
        with watched(machine) as theirs:
            _paged(machine, model, prompt_ids, new)
        if number:
            seconds["paged"].append(theirs.seconds)
            report.so_far(*ratio("paged"), "engine-paged")
    if hasattr(model, DESTROY):
        getattr(model, DESTROY)()
    report(*ratio("paged"), "engine-paged")


class _NamedDecoders(PlainKernels):
    """The plain path, and the names of the decoders that it chose."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def decoder(self, *arguments: Any, **options: Any) -> Decoder:
        decoder = super().decoder(*arguments, **options)
        self.names.add(type(decoder).__name__)
        return decoder


def _paged(machine: Machine, model: Any, prompts: list[list[int]], new: int) -> None:
    """Sample by transformers' continuous batching, whose cache and graphs stay for the next time where transformers can do that."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    known = inspect.signature(model.generate_batch).parameters
    stays = {"persistent_manager": True} if "persistent_manager" in known else {}
    small = {"num_blocks": 16, "max_batch_tokens": 64} if machine.dry else {"max_memory_percent": 0.5}
    answers = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=new, do_sample=True, top_k=0, top_p=1.0, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(**small),
        progress_bar=False,
        **stays,
    )
    sampled = [len(answer.generated_tokens) for answer in answers.values()]
    if sampled != [new] * len(prompts):
        raise RuntimeError(
            f"generate_batch gave {len(sampled)} of {len(prompts)} answers, with {set(sampled)} tokens, not {new}"
        )


def _step_bytes(model: Any, rows: int, tokens: float) -> float:
    """Bytes that a decoding step must read: each weight once, and keys and values of so many tokens a row, all in 16 bits."""
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    return 2.0 * (sum(weight.numel() for weight in model.parameters()) + rows * tokens * cached)


def _bandwidth(machine: Machine) -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.zeros(machine.size(1 << 31, 1 << 20), dtype=torch.uint8, device=machine.device)
    target, seconds = torch.empty_like(source), []
    for _ in range(5):
        with watched(machine) as watch:
            target.copy_(source)
        seconds.append(watch.seconds)
    return 2 * source.numel() / statistics.median(seconds[1:])


def mismatch(machine: Machine, report: Report) -> None:
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
    details = {
        "tolerance_of_the_probe": ROUGH_TOLERANCE,
        "largest_mean_of_a_probe": float(gaps.unfold(1, NEW_TOKENS, NEW_TOKENS).mean(-1).max()),
        "mean": float(gaps.mean()),
        **{name: float(gaps.flatten().quantile(part)) for name, part in QUANTILES.items()},
        "histogram": dict(zip(["below 1e-5", *(f"from {edge:.0e}" for edge in edges[1:-1])], counts, strict=True)),
        "mean_logprob": float(trained.mean()),
        "tokens": gaps.numel(),
    }
    report(gaps.max(), details)


def _engine(model: Any, rows: int, kernels: Kernels | None = None) -> Engine:
    start = EngineStart(model=model, tokenizer=None, version=0, compute=Inline(), kernels=kernels or PlainKernels())
    return Transformers(Transformers.Options(max_batch_size=rows, autocast="bfloat16")).start(start)


def _sample(engine: Engine, prompts: list[list[int]], new: int) -> list[Generation]:
    async def all_of_them() -> list[Generation]:
        engine.expect(len(prompts))
        requests = (engine.generate(ids, Sampling(new), (0, number)) for number, ids in enumerate(prompts))
        return await asyncio.gather(*requests)

    return asyncio.run(all_of_them())
