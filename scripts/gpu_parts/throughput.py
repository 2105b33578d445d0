"""The share of the GPU's peak that an optimizer batch uses, in micro-batches of 16k tokens, and what Liger's kernels save."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from gpu_parts.machine import GB, Machine, Skipped, random_model, random_rows, require, update, watched, worker_of
from rlhf_host.config.schema import TrainConfig
from rlhf_host.engines.plain_path import PlainKernels
from rlhf_host.models.passes import Passes
from rlhf_host.records.tensors import Experience
from rlhf_host.training.role import rows_of


def mfu(machine: Machine, size: str, checkpointing: bool) -> tuple[float, dict[str, Any]]:
    """Floating-point operations that forward and backward need, per second, over the peak; recomputed ones do not count."""
    model = random_model(machine, size)
    if checkpointing:  # as the host's loader does
        model.gradient_checkpointing_enable({"use_reentrant": False})
    prompt, completion, count = machine.size(256, 8), machine.size(1792, 24), machine.size(32, 8)
    tokens = machine.size(16384, 64)
    worker = worker_of(model, TrainConfig(max_tokens_per_microbatch=tokens, autocast="bfloat16", shared_prefix="off"))
    rows = random_rows(model, count, prompt, completion)
    seconds: list[float] = []
    for number in range(machine.size(6, 2)):
        with watched(machine) as watch:
            update(worker, rows)
        if number:
            seconds.append(watch.seconds)
    median = statistics.median(seconds)
    flops = count * row_flops(model, prompt, completion)
    return flops / median / machine.peak_tflops / 1e12, {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "tokens_per_s": count * (prompt + completion) / median,
        "step_s": median,
        "tflops": flops / median / 1e12,
        "peak_gb": watch.peak_bytes / GB,
        "gradient_checkpointing": checkpointing,
    }


def liger_gain(machine: Machine) -> tuple[float, dict[str, Any]]:
    """Seconds of forward and backward without kernels over those with Liger's, which the host chose after its comparison."""
    require("rlhf-kernels-liger")
    from rlhf_kernels_liger import LigerKernels, Options

    model = random_model(machine)
    rows = random_rows(model, 8, machine.size(256, 8), machine.size(1792, 24))
    liger: Any = LigerKernels(Options())
    kernels = liger.choose([("liger", liger)], PlainKernels())
    seconds, details = {}, {}
    for name, chosen in (("plain", None), ("liger", kernels)):
        passes = Passes(model, kernels=chosen, shared_prefix="off", autocast=torch.bfloat16)
        seconds[name], peak = median_backward(machine, passes, rows)
        details |= {f"{name}_s": seconds[name], f"{name}_peak_gb": peak / GB}
    if not any("are used" in line for line in kernels.reports):
        raise Skipped("; ".join(kernels.reports))
    return seconds["plain"] / seconds["liger"], {**details, "reports": kernels.reports}


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
