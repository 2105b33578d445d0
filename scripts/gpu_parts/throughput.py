"""How much of the GPU's peak an optimizer batch uses, in micro-batches of 16k tokens."""

from __future__ import annotations

import statistics
from typing import Any

from gpu_parts.machine import GB, Machine, random_model, random_rows, update, watched, worker_of
from rlhf_host.config.schema import TrainConfig


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


def row_flops(model: Any, prompt: int, completion: int) -> float:
    """Of one row, forward and backward: 6 per weight and token in the layers, and in the head at the tokens that are predicted;
    causal attention with two products of half a square, forward once and backward twice."""
    config, length = model.config, prompt + completion
    layers = sum(weight.numel() for weight in model.model.layers.parameters())
    head = config.vocab_size * config.hidden_size
    attention = 6 * config.num_hidden_layers * config.hidden_size * length**2
    return 6.0 * (layers * length + head * completion) + attention
