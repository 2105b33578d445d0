"""The engine vllm: its speed beside bare vLLM and with a process of its own, the memory of its phases, and syncs to it; and
whether this GPU runs vLLM's library at all."""

from __future__ import annotations

import asyncio
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rlhf_authoring.models import tiny_tokenizer

from gpu_parts.machine import GB, Machine, Report, Skipped, finish, random_model, watched
from rlhf_host.distributed.sync.plugin import IPC
from rlhf_host.distributed.vllm.plugin import Vllm
from rlhf_host.protocols import EngineStart, SyncTarget, WakesInParts
from rlhf_host.records.episodes import Generation, Sampling, Trajectory
from rlhf_host.runtimes.compute import Inline
from rlhf_host.weight_sync.local_source import LocalSource
from rlhf_host.weight_sync.verify import ROUGH_TOLERANCE, verify_sync

SHARE = 0.4
"""Part of the GPU for an engine, so that two are there one after the other."""


_RATES: dict[tuple[bool, bool], float] = {}
"""Tokens per second of the engine in this process (dry or not, core in a process of its own or not): later parts need no engine."""


def whole(machine: Machine, report: Report) -> None:
    """One engine with its core in its own process, and with sleep: tokens per second with a seed for each request over those
    without; the memory of an engine whose weights alone are awake over the bytes of these weights; and seconds of a sync.
    """
    own, prompts, new = not machine.dry, _prompts(machine), machine.size(512, 8)
    with _directory(machine) as directory, _engine(machine, directory, sleep=True) as engine:
        seeded, free = (_rate(machine, engine, prompts, new, seeds=each) for each in (True, False))
        _RATES[machine.dry, own] = seeded
        rates = {"seeded_tokens_per_s": seeded, "free_tokens_per_s": free, "requests": len(prompts)}
        report(seeded / free, rates, "vllm-seeds")
        _sync(machine, report, directory, engine)
        _phases(machine, report, directory, engine)


def over_bare(machine: Machine, report: Report) -> None:
    """Tokens per second of the engine over those of vLLM's own ``LLM`` with the same settings and prompts."""
    prompts, new = _prompts(machine), machine.size(512, 8)
    with _directory(machine) as directory:
        ours = _known_rate(machine, directory, own=not machine.dry)
        bare = _bare_rate(machine, directory, prompts, new)
    report(ours / bare, {"engine_tokens_per_s": ours, "bare_tokens_per_s": bare, "requests": len(prompts)})


def own_process(machine: Machine, report: Report) -> None:
    """Tokens per second with vLLM's core in a process of its own, over those with the core in the engine's process."""
    with _directory(machine) as directory:
        apart, here = (_known_rate(machine, directory, own=each) for each in (True, False))
    report(apart / here, {"own_process_tokens_per_s": apart, "in_process_tokens_per_s": here})


def library(machine: Machine, report: Report) -> None:
    """Largest difference of a norm by vLLM's compiled library from the formula, relative: whether this device runs its code. Only
    the library is loaded, not vLLM.
    """
    found = importlib.util.find_spec("vllm")
    folders = [] if found is None else found.submodule_search_locations or []
    files = [path for folder in folders for path in Path(folder).glob("_C*.so")]
    files.sort(key=lambda path: ("AVX2" not in path.name, path.name))  # of those for CPUs the one that every CPU runs
    if not files:
        raise Skipped("vllm is not installed here, or has no compiled library")
    problems = []
    for path in files:
        try:
            torch.ops.load_library(str(path))
        except OSError as error:  # it needs another one
            problems.append(f"{path.name}: {error}")
        if hasattr(torch.ops._C, "rms_norm"):
            break
    else:
        raise RuntimeError("; ".join(problems) or f"{', '.join(path.name for path in files)}: no rms_norm in them")
    torch.manual_seed(0)
    states, weight = (torch.randn(*shape, device=machine.device, dtype=torch.bfloat16) for shape in ((256, 1024), (1024,)))
    normed = torch.empty_like(states)
    torch.ops._C.rms_norm(normed, states, weight, 1e-6)
    finish(machine)
    wide = states.float()
    expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.float()
    gap = (normed.float() - expected).abs().max() / expected.abs().max()
    report(gap, {"file": path.name, "not_loaded": problems})


def _phases(machine: Machine, report: Report, directory: Path, engine: Any) -> None:
    """The engine has no weights afterwards."""
    if not isinstance(engine, WakesInParts):
        raise RuntimeError("the engine does not wake in parts")
    used = {"awake": _used(machine)}
    for name in ("sleep_empty", "wake_weights", "wake"):
        asyncio.run(getattr(engine, name)())
        used[name] = _used(machine)
    if machine.dry:
        raise Skipped("memory is not measured on a CPU")
    weights = used["wake_weights"] - used["sleep_empty"]
    report(weights / _weight_bytes(directory), {name: size / GB for name, size in used.items()}, "vllm-phases")


def _sync(machine: Machine, report: Report, directory: Path, engine: Any) -> None:
    """A sync of 1.5B weights in bfloat16 to an engine on the trainer's GPU, which then samples by these weights."""
    model, seconds = random_model(machine, seed=1), list[float]()  # not the weights that the engine starts with

    async def logprobs(trajectories: Sequence[Trajectory]) -> list[list[float]]:
        return [_logprobs(machine, model, *(segment.token_ids for segment in each.segments)) for each in trajectories]

    def details() -> dict[str, Any]:
        return {"first_s": seconds[0], "gb": _weight_bytes(directory) / GB, "syncs": len(seconds)}

    async def scenario() -> float:
        plugin, source, targets = IPC(IPC.Options(timeout_s=120)), LocalSource(model), [SyncTarget("engine", engine)]
        await plugin.connect(targets)
        for version in range(1, machine.size(7, 3)):
            finish(machine)
            started = time.perf_counter()
            await plugin.send(source, version)
            seconds.append(time.perf_counter() - started)
            if version > 1:
                report.so_far(statistics.median(seconds[1:]), details(), "colocated-sync")
        gap = await verify_sync(targets, logprobs, version, _prompts(machine)[0], tolerance=ROUGH_TOLERANCE)
        await plugin.close()
        return gap

    gap = asyncio.run(scenario())
    report(statistics.median(seconds[1:]), {**details(), "gap_of_a_probe": gap}, "colocated-sync")


def _weight_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


@torch.no_grad()
def _logprobs(machine: Machine, model: Any, prompt: list[int], completion: list[int]) -> list[float]:
    ids = torch.tensor([[*prompt, *completion]], device=machine.device)
    with torch.autocast(machine.device.type, torch.bfloat16, enabled=not machine.dry):
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()


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


def _rate(machine: Machine, engine: Any, prompts: list[list[int]], new: int, *, seeds: bool = True) -> float:
    engine.options = engine.options.model_copy(update={"seeds": seeds})  # it reads them at every request

    async def sample() -> list[Generation]:
        keys = ((0, number, 0) for number in range(len(prompts)))
        return await asyncio.gather(*(engine.generate(ids, Sampling(new), key) for ids, key in zip(prompts, keys, strict=True)))

    asyncio.run(sample())  # warm
    with watched(machine) as watch:
        answers = asyncio.run(sample())
    return sum(len(answer.token_ids) for answer in answers) / watch.seconds


def _known_rate(machine: Machine, directory: Path, *, own: bool) -> float:
    """Returns the engine's rate, measured unless an earlier part of this process did."""
    if (machine.dry, own) not in _RATES:
        with _engine(machine, directory, multiprocess=own) as engine:
            _RATES[machine.dry, own] = _rate(machine, engine, _prompts(machine), machine.size(512, 8))
    return _RATES[machine.dry, own]


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
