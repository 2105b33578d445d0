"""The engine vllm: its speed beside bare vLLM, with and without a process of its own, and the memory of its phases."""

from __future__ import annotations

import asyncio
import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rlhf_authoring.models import tiny_tokenizer

from gpu_parts.machine import GB, Machine, Skipped, random_model, watched
from rlhf_host.engines.vllm import Vllm
from rlhf_host.protocols import EngineStart, WakesInParts
from rlhf_host.records.episodes import Generation, Sampling
from rlhf_host.runtimes.compute import Inline

SHARE = 0.4
"""Part of the GPU for an engine, so that two are there one after the other."""


def over_bare(machine: Machine) -> tuple[float, dict[str, Any]]:
    """Tokens per second of the engine over those of vLLM's own ``LLM`` with the same settings and prompts."""
    prompts, new = _prompts(machine), machine.size(512, 8)
    with _directory(machine) as directory:
        ours = _rate(machine, directory, prompts, new)
        bare = _bare_rate(machine, directory, prompts, new)
    return ours / bare, {"engine_tokens_per_s": ours, "bare_tokens_per_s": bare, "requests": len(prompts)}


def own_process(machine: Machine) -> tuple[float, dict[str, Any]]:
    """Tokens per second with vLLM's core in a process of its own, over those with the core in the engine's process."""
    prompts, new = _prompts(machine), machine.size(512, 8)
    with _directory(machine) as directory:
        apart, here = (_rate(machine, directory, prompts, new, multiprocess=each) for each in (True, False))
    return apart / here, {"own_process_tokens_per_s": apart, "in_process_tokens_per_s": here}


def seeds(machine: Machine) -> tuple[float, dict[str, Any]]:
    """Tokens per second with a seed for each request, over those without."""
    prompts, new = _prompts(machine), machine.size(512, 8)
    with _directory(machine) as directory:
        seeded, free = (_rate(machine, directory, prompts, new, seeds=each) for each in (True, False))
    return seeded / free, {"seeded_tokens_per_s": seeded, "free_tokens_per_s": free, "requests": len(prompts)}


def phases(machine: Machine) -> tuple[float, dict[str, Any]]:
    """Memory of an engine whose weights alone are awake, over the bytes of these weights; and that of its other phases."""
    with _directory(machine) as directory, _engine(machine, directory, sleep=True) as engine:
        if not isinstance(engine, WakesInParts):
            raise RuntimeError("the engine does not wake in parts")
        used = {"awake": _used(machine)}
        for name in ("sleep_empty", "wake_weights", "wake"):
            asyncio.run(getattr(engine, name)())
            used[name] = _used(machine)
        weights = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    if machine.dry:
        raise Skipped("memory is not measured on a CPU")
    return (used["wake_weights"] - used["sleep_empty"]) / weights, {name: size / GB for name, size in used.items()}


@contextmanager
def _directory(machine: Machine) -> Iterator[Path]:
    """A model of 1.5B random weights in bfloat16."""
    if importlib.util.find_spec("vllm") is None:
        raise Skipped("vllm is not installed here")
    with tempfile.TemporaryDirectory() as folder:
        random_model(machine).to(torch.bfloat16).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        if not machine.dry:
            torch.cuda.empty_cache()
        yield Path(folder)


@contextmanager
def _engine(machine: Machine, directory: Path, **options: Any) -> Iterator[Any]:
    settings = Vllm.Options(gpu_memory_utilization=SHARE, dtype="float32" if machine.dry else "bfloat16", **options)
    start = EngineStart(model=directory, tokenizer=tiny_tokenizer(), version=0, compute=Inline(), kernels=None)
    engine = Vllm(settings).start(start)
    try:
        yield engine
    finally:
        asyncio.run(engine.close())


def _prompts(machine: Machine) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(5, 40, (machine.size(512, 4), machine.size(256, 8)), generator=generator).tolist()


def _rate(machine: Machine, directory: Path, prompts: list[list[int]], new: int, **options: Any) -> float:
    with _engine(machine, directory, **options) as engine:

        async def sample() -> list[Generation]:
            keys = ((0, number, 0) for number in range(len(prompts)))
            return await asyncio.gather(
                *(engine.generate(ids, Sampling(new), key) for ids, key in zip(prompts, keys, strict=True))
            )

        asyncio.run(sample())  # warm
        with watched(machine) as watch:
            answers = asyncio.run(sample())
    return sum(len(answer.token_ids) for answer in answers) / watch.seconds


def _bare_rate(machine: Machine, directory: Path, prompts: list[list[int]], new: int) -> float:
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(directory),
        gpu_memory_utilization=SHARE,
        dtype="float32" if machine.dry else "bfloat16",
        enforce_eager=machine.dry,
        max_num_seqs=Vllm.Options().max_num_seqs,
    )
    settings = SamplingParams(temperature=1.0, max_tokens=new, logprobs=0)
    given = [{"prompt_token_ids": ids} for ids in prompts]
    llm.generate(given, settings, use_tqdm=False)
    with watched(machine) as watch:
        answers = llm.generate(given, settings, use_tqdm=False)
    return sum(len(answer.outputs[0].token_ids) for answer in answers) / watch.seconds


def _used(machine: Machine) -> int:
    if machine.dry:
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free
