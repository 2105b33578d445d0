"""The parts: what each measures, the numbers that it must meet, what it costs and is worth; and the three calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gpu_parts import (
    against_trl,
    ipc,
    kernels,
    logprobs,
    nccl,
    offload,
    pictures,
    prefix,
    runs,
    sampling,
    throughput,
    with_vllm,
)
from gpu_parts.throughput import Way

START_S = 12.0
"""Seconds of a process until it measures: it imports torch and transformers, and the host compares its layouts."""
MODELS = "models"
"""Process of the parts that need a model of random weights and leave nothing behind."""
VLLM = "vllm"
"""Process of the parts that need vLLM: what an earlier one measured is known to a later one."""


@dataclass(frozen=True)
class Figure:
    """A number, and what it has to be."""

    name: str
    about: str
    at_least: float = float("-inf")
    at_most: float = float("inf")
    everywhere: bool = False
    """It must be met in a dry run too, because it is no matter of speed or size."""

    @property
    def limit(self) -> str:
        return f"<= {self.at_most:g}" if self.at_least == float("-inf") else f">= {self.at_least:g}"

    def met(self, value: float) -> bool:
        return self.at_least <= value <= self.at_most


@dataclass(frozen=True)
class Part:
    """What is measured at once: one figure, or several."""

    name: str
    figures: tuple[Figure, ...]
    measure: Callable[..., None]
    """Called with a ``Machine`` and a ``Report``. Raises ``Skipped`` where it cannot measure."""
    seconds: float
    """Estimate on one H100, without the start of a process."""
    worth: float
    """How much people and decisions depend on it: 100 is what people choose by."""
    process: str = ""
    """Neighbours with the same name run in one process; empty: in one of its own."""

    @property
    def worth_per_second(self) -> float:
        return self.worth / (self.seconds + (0 if self.process else START_S))


def _one(
    name: str, about: str, measure: Callable[..., None], *, seconds: float, worth: float, process: str = "", **limits: Any
) -> Part:
    """A part with one figure of the same name."""
    return Part(name, (Figure(name, about, **limits),), measure, seconds, worth, process)


def _mfu(name: str, about: str, way: Way, *, seconds: float, worth: float, at_least: float, size: str = "3b") -> Part:
    measure = partial(throughput.mfu, size=size, way=way)
    return _one(name, about, measure, seconds=seconds, worth=worth, process=MODELS, at_least=at_least)


def _by_worth(*parts: Part) -> list[Part]:
    """Those first that are worth most per second, so that the time that is there buys most."""
    return sorted(parts, key=lambda part: -part.worth_per_second)


PARTS = _by_worth(
    _mfu(
        "mfu-3b",
        "part of the peak that training reaches, 3B parameters, micro-batches of 16k tokens, gradient checkpointing",
        Way(),
        seconds=22,
        worth=90,
        at_least=0.35,
    ),
    _mfu("mfu-3b-triton", "mfu-3b with the kernels triton", Way("triton"), seconds=18, worth=90, at_least=0.36),
    _mfu(
        "mfu-3b-16bit",
        "mfu-3b with weights and optimizer in bfloat16, which loses small updates: for its time alone",
        Way(weights="bfloat16"),
        seconds=18,
        worth=45,
        at_least=0.3,
    ),
    _mfu(
        "mfu-3b-autocast",
        "mfu-3b with weights in float32 under autocast, where mfu-3b is without it",
        Way(weights="autocast"),
        seconds=22,
        worth=25,
        at_least=0.25,
    ),
    _mfu(
        "mfu-3b-all",
        "mfu-3b with the kernels triton, and every second layer kept in place of computed again",
        Way("triton", checkpointed=0.5),
        seconds=16,
        worth=40,
        at_least=0.38,
    ),
    _mfu("mfu-1.5b", "mfu-3b with 1.5B parameters in its place", Way(), seconds=13, worth=30, at_least=0.35, size="1.5b"),
    Part(
        "kernels-triton",
        (
            Figure(
                "kernels-triton-float32",
                "relative distance of the gradient with the kernels triton from the plain path's, float32",
                at_most=1e-5,
            ),
            Figure(
                "kernels-triton-bfloat16",
                "distance of that gradient in bfloat16 from the plain one in float32, over the plain path's in bfloat16",
                at_most=1.1,
            ),
            Figure("kernels-triton", "how many times faster 8 × 2048 tokens of 1.5B are with the kernels triton", at_least=1.2),
        ),
        partial(kernels.gain_and_equality, name="triton", figure="kernels-triton"),
        seconds=20,
        worth=60,
        process=MODELS,
    ),
    _one(
        "liger-gain",
        "how many times faster 8 × 2048 tokens of 1.5B are with Liger's kernels",
        partial(kernels.gain, name="liger"),
        seconds=12,
        worth=3,
        process=MODELS,
        at_least=1.0,
    ),
    Part(
        "logits",
        (
            Figure(
                "logits",
                "seconds of a head of 7B, forward and backward, over those of its matrix products alone",
                at_most=1.15,
            ),
            Figure("logits-alone", "logits without the entropy", at_most=1.15),
            Figure("logits-kept", "logits where they are kept, not computed twice", at_most=1.15),
            Figure("logits-triton", "logits with the kernels triton", at_most=1.15),
        ),
        logprobs.speed,
        seconds=8,
        worth=40,
        process=MODELS,
    ),
    _one(
        "logprobs",
        "GB above the hidden states for log-probabilities of 16k tokens at a vocabulary of 152k",
        logprobs.memory,
        seconds=5,
        worth=4,
        process=MODELS,
        at_most=2.5,
    ),
    Part(
        "engine",
        (
            Figure("engine", "tokens per second of the embedded engine over those of generate", at_least=1.0),
            Figure(
                "engine-paged",
                "the engine's over those of transformers' continuous batching in bfloat16",
                at_least=1.0,
            ),
            Figure(
                "engine-floor",
                "the engine's part of what the memory would allow, if a step read weights and cache once",
                at_least=0.3,
            ),
        ),
        sampling.speed,
        seconds=38,
        worth=120,
        process=MODELS,
    ),
    _one(
        "mismatch",
        "largest gap between sampler's and trainer's log-probability of a token, bfloat16, in nats",
        sampling.mismatch,
        seconds=15,
        worth=8,
        process=MODELS,
        at_most=sampling.ROUGH_TOLERANCE,
        everywhere=True,
    ),
    _one(
        "trl", "seconds per step of TRL over ours, TRL at its fastest", against_trl.ratio, seconds=110, worth=180, at_least=1.5
    ),
    _one(
        "trl-vllm",
        "trl where both sample with vLLM on the same GPU",
        partial(against_trl.ratio, peer="vllm"),
        seconds=140,
        worth=200,
        at_least=1.5,
    ),
    _one(
        "trl-prompts",
        "trl with prompts of 512 tokens and answers of 16, where decoding is the smaller part of a step",
        partial(against_trl.ratio, case="1b-prompts"),
        seconds=80,
        worth=60,
        at_least=1.5,
    ),
    _one(
        "trl-generate",
        "trl with TRL's default: generate, without Liger",
        partial(against_trl.ratio, peer="generate"),
        seconds=120,
        worth=20,
        at_least=1.5,
    ),
    Part(
        "vllm-all",
        (
            Figure("vllm-seeds", "tokens per second with a seed for each request over those without seeds", at_least=0.9),
            Figure("colocated-sync", "seconds of a sync of 1.5B in bfloat16 to vLLM on the same GPU", at_most=0.15),
            Figure(
                "vllm-phases",
                "memory of an engine whose weights alone are awake over the bytes of these weights",
                at_most=1.15,
            ),
        ),
        with_vllm.whole,
        seconds=100,
        worth=125,
        process=VLLM,
    ),
    _one(
        "vllm-bare",
        "tokens per second of the engine vllm over those of bare vLLM",
        with_vllm.over_bare,
        seconds=60,
        worth=74,
        process=VLLM,
        at_least=0.95,
    ),
    _one(
        "vllm-process",
        "tokens per second with vLLM's core in a process of its own over those with the core in this one",
        with_vllm.own_process,
        seconds=60,
        worth=5,
        process=VLLM,
        at_least=1.0,
    ),
    _one(
        "vllm-library",
        "largest relative difference of a norm by vLLM's compiled library: does this GPU run it?",
        with_vllm.library,
        seconds=3,
        worth=9,
        process=MODELS,
        at_most=0.01,
    ),
    _one(
        "prefix-gain",
        "how many times faster a group of 8 × (1024 + 512) tokens is with a shared prompt",
        prefix.gain,
        seconds=14,
        worth=12,
        process=MODELS,
        at_least=1.5,
    ),
    _one(
        "prefix-gradient",
        "relative distance of the gradient with a shared prompt from the one without sharing, float32",
        prefix.gradient,
        seconds=8,
        worth=2,
        process=MODELS,
        at_most=1e-3,
        everywhere=True,
    ),
    _one(
        "flex-gain",
        "how many times faster a group of 16 × (4096 + 512) tokens is under FlexAttention than where attention gathers rows",
        prefix.flex_gain,
        seconds=240,
        worth=8,
        at_least=1.5,
    ),
    _one(
        "flex-gradient",
        "relative distance of the gradient under FlexAttention from the one that gathers, float32",
        prefix.flex_gradient,
        seconds=180,
        worth=7,
        at_most=1e-3,
    ),
    _one(
        "budget",
        "memory per token of the budget of lines with up to 64 completions, over that of padded rows",
        prefix.budget,
        seconds=45,
        worth=7,
        process=MODELS,
        at_most=1.15,
    ),
    _one(
        "pictures-gradient",
        "relative distance of the gradient of a group with pictures from that of plain transformers, float32",
        pictures.gradient,
        seconds=15,
        worth=8,
        process=MODELS,
        at_most=1e-3,
        everywhere=True,
    ),
    _one(
        "pictures-gain",
        "how many times faster a group of 8 × 512 tokens with a picture of 1024 tokens is than in plain transformers",
        pictures.gain,
        seconds=40,
        worth=8,
        process=MODELS,
        at_least=1.5,
    ),
    _one(
        "pictures-run",
        "share of right held-out answers after 60 steps on drawn pictures",
        pictures.learns,
        seconds=180,
        worth=9,
        at_least=0.9,
    ),
    _one(
        "ipc", "GB of weights per second to an engine's process on the same GPU", ipc.rate, seconds=25, worth=4, at_least=20.0
    ),
    _one(
        "ipc-bf16",
        "ipc where the engine keeps weights in bfloat16, of bytes that are sent",
        partial(ipc.rate, dtype=torch.bfloat16),
        seconds=18,
        worth=16,
        at_least=100.0,
    ),
    _one(
        "ipc-killed",
        "seconds until a sync to two engines fails after one was killed; the next must work",
        ipc.killed,
        seconds=25,
        worth=3,
        at_most=10.0,
        everywhere=True,
    ),
    _one(
        "nccl-forming",
        "seconds until the trainer trains again after a receiver was killed before a communicator was formed",
        nccl.forming,
        seconds=30,
        worth=8,
        at_most=10.0,
        everywhere=True,
    ),
    _one(
        "nccl-abort",
        "nccl-forming where it is killed in mid-sync; with two GPUs",
        nccl.abort,
        seconds=30,
        worth=7,
        at_most=10.0,
        everywhere=True,
    ),
    _one(
        "offload",
        "part of weights and optimizer state that offload frees",
        offload.freed,
        seconds=40,
        worth=6,
        at_least=0.7,
    ),
    _one(
        "pinned",
        "GB per second of offload and reload through pinned memory, the slower way",
        offload.rate,
        seconds=10,
        worth=9,
        process=MODELS,
        at_least=20.0,
    ),
    _one(
        "growth",
        "relative growth of reserved memory over the last 25 of 50 steps",
        runs.growth,
        seconds=45,
        worth=45,
        at_most=0.02,
    ),
    _one(
        "resume",
        "largest difference of a weight after a resume, beyond that of two equal runs",
        runs.resume,
        seconds=50,
        worth=4,
        at_most=0.0,
        everywhere=True,
    ),
)
"""In the order in which they run."""

FIGURES = {figure.name: figure for part in PARTS for figure in part.figures}


@dataclass(frozen=True)
class Call:
    """What one command measures on a machine that is lent for minutes."""

    parts: tuple[str, ...]
    seconds: float
    """Limit of the whole command, with what is unpacked before."""


CALLS = {
    "first": Call(("mfu-3b", "mfu-3b-triton", "engine", "trl", "logits", "vllm-library", "kernels-triton"), 260),
    "second": Call(("vllm-all", "vllm-bare", "mfu-1.5b", "mfu-3b-16bit", "mfu-3b-all", "ipc-bf16"), 290),
    "third": Call(("trl-vllm", "prefix-gain", "pinned", "mfu-3b-autocast"), 230),
}
"""Together 780 s: a machine that is lent for 15 minutes starts for about 90 s. If only one comes, it is the first."""
CALL_ROUNDS, CALL_STEPS = 1, 4
"""Of a comparison with TRL in a call."""


def estimate_s(parts: list[Part]) -> float:
    """Seconds of these parts one after the other, with the starts of their processes."""
    seconds, running = 0.0, ""
    for part in parts:
        seconds += part.seconds + (0 if part.process and part.process == running else START_S)
        running = part.process
    return seconds
