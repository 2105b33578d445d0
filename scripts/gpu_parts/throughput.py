"""The share of the GPU's peak that an optimizer batch uses, in micro-batches of 16k tokens."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from gpu_parts.machine import GB, Machine, Report, Skipped, random_model, random_rows, update, watched, worker_of
from rlhf_host.backends.torch import Torch
from rlhf_host.config.schema import TrainConfig
from rlhf_host.models.passes import Passes
from rlhf_host.protocols import BackendTraits
from rlhf_host.records.tensors import Experience
from rlhf_host.training.role import rows_of


@dataclass(frozen=True)
class Way:
    """How a model is trained; by default the plain path with float32 weights, and every layer computed again."""

    kernels: str | None = None
    """Name of an installed package's kernels."""
    weights: Literal["own", "autocast", "bfloat16"] = "own"
    """What products in bfloat16 read: what the backend makes of weights in float32; these under autocast; or weights and optimizer
    are in bfloat16, which loses small updates and is there for its time alone.
    """
    checkpointed: float = 1.0
    """Share of the layers that the backward pass computes again."""


def mfu(machine: Machine, report: Report, *, size: str, way: Way = Way()) -> None:
    """Floating-point operations that forward and backward need, per second, over the peak; recomputed ones do not count."""
    from gpu_parts.kernels import chosen, refuse_unused

    kernels = chosen(way.kernels) if way.kernels else None
    model = random_model(machine, size).to(torch.bfloat16 if way.weights == "bfloat16" else torch.float32)
    _checkpoint(model, way.checkpointed)
    prompt, completion, count = machine.size(256, 8), machine.size(1792, 24), machine.size(32, 8)
    settings = TrainConfig(
        max_tokens_per_microbatch=machine.size(16384, 64),
        autocast="off" if way.weights == "bfloat16" else "bfloat16",
        shared_prefix="off",
    )
    worker = worker_of(model, settings, _UnderAutocast(Torch.Options()) if way.weights == "autocast" else None, kernels)
    rows = random_rows(model, count, prompt, completion)
    flops, seconds = count * row_flops(model, prompt, completion), list[float]()
    for number in range(machine.size(4, 2)):
        with watched(machine) as watch:
            update(worker, rows)
        if not number:
            continue
        seconds.append(watch.seconds)
        median = statistics.median(seconds)
        details = {
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "tokens_per_s": count * (prompt + completion) / median,
            "step_s": median,
            "tflops": flops / median / 1e12,
            "peak_gb": watch.peak_bytes / GB,
            "checkpointed_layers": sum(layer.gradient_checkpointing for layer in model.model.layers),
            "weights": str(next(model.parameters()).dtype),
            "repetitions": len(seconds),
        }
        report.so_far(flops / median / machine.peak_tflops / 1e12, details)
    if kernels is not None:
        refuse_unused(machine, kernels)
        details["reports"] = kernels.reports
    report(flops / median / machine.peak_tflops / 1e12, details)


class _UnderAutocast(Torch):
    """The backend ``torch`` as one that has no masters, so that weights stay in float32."""

    @property
    def traits(self) -> BackendTraits:
        traits = super().traits
        if not getattr(traits, "masters", False):
            raise Skipped("weights are in float32 under autocast here in any case")
        return replace(traits, masters=False)


def _checkpoint(model: Any, share: float) -> None:
    """Recompute this share of the layers in the backward pass, spread evenly."""
    model.gradient_checkpointing_enable({"use_reentrant": False})  # as the host's loader does
    for number, layer in enumerate(model.model.layers):
        layer.gradient_checkpointing = int((number + 1) * share) > int(number * share)


def median_backward(machine: Machine, passes: Passes, rows: Experience) -> tuple[float, int]:
    """Returns as ``median_pass`` for a loss of all rows."""
    return median_pass(machine, passes.model, lambda: backward(passes, rows), machine.size(6, 2))


def median_pass(machine: Machine, model: Any, run: Callable[[], None], times: int) -> tuple[float, int]:
    """Returns the median seconds of a forward and backward pass, without the first of ``times``, and the bytes that the last one
    took at most.
    """
    seconds = []
    for number in range(times):
        with watched(machine) as watch:
            run()
        if number:
            seconds.append(watch.seconds)
        model.zero_grad()
    return statistics.median(seconds), watch.peak_bytes


def backward(passes: Passes, rows: Experience) -> None:
    """Forward and backward of a loss of all rows."""
    logprobs = passes.forward(**rows_of(rows)).logprobs
    assert logprobs is not None
    assert rows.advantages is not None
    loss = -(rows.advantages.to(logprobs.device) * logprobs).mean()
    loss.backward()


def row_flops(model: Any, prompt: int, completion: int) -> float:
    """Of one row, forward and backward: 6 per weight and token in the layers, and in the head at the tokens that are predicted;
    causal attention with two products of half a square, forward once and backward twice."""
    config, length = model.config, prompt + completion
    layers = sum(weight.numel() for weight in model.model.layers.parameters())
    head = config.vocab_size * config.hidden_size
    attention = 6 * config.num_hidden_layers * config.hidden_size * length**2
    return 6.0 * (layers * length + head * completion) + attention
