"""A prompt that a group shares: how much faster its update is, whether the gradient is the same, and what memory it takes."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from gpu_parts.machine import GB, Machine, Report, Skipped, random_model, random_rows, watched
from gpu_parts.throughput import backward, median_backward
from rlhf_host.models.passes import Passes
from rlhf_host.records.tensors import Experience

SETTINGS: tuple[Literal["off", "on"], ...] = ("off", "on")
KERNELS = "sdpa", "flex_attention"
MANY_ROWS = (512, 8, 256), (1024, 16, 64), (1024, 64, 16)
"""Prompt, completions, tokens of each: attention gathers up to 32 times the tokens of the line."""


def gain(machine: Machine, report: Report) -> None:
    """Seconds of forward and backward without sharing over those with it, in bfloat16."""
    model = random_model(machine)
    rows, seconds, details = _group(machine, model), {}, {}
    for shared in SETTINGS:
        seconds[shared], peak = median_backward(machine, Passes(model, shared_prefix=shared, autocast=torch.bfloat16), rows)
        details |= {f"{shared}_s": seconds[shared], f"{shared}_peak_gb": peak / GB}
    report(seconds["off"] / seconds["on"], details)


def gradient(machine: Machine, report: Report) -> None:
    """Relative distance of the two gradients, in float32."""
    model = random_model(machine, layers=4)
    rows, gradients = _group(machine, model), []
    for shared in SETTINGS:
        gradients.append(_gradient(Passes(model, shared_prefix=shared), rows))
    padded, shared_one = gradients
    report((shared_one - padded).norm() / padded.norm(), {"norm": float(padded.norm())})


def flex_gradient(machine: Machine, report: Report) -> None:
    """Relative distance of the gradient by FlexAttention from the one of attention that gathers rows, in float32."""
    model = random_model(machine, layers=4)
    rows, gradients = _group(machine, model), []
    for kernel in KERNELS:
        model.set_attn_implementation(_kernel(machine, kernel))
        gradients.append(_gradient(Passes(model, shared_prefix="on"), rows))
    _refuse_dry(machine)
    gathered, flexible = gradients
    report((flexible - gathered).norm() / gathered.norm(), {"norm": float(gathered.norm())})


def flex_gain(machine: Machine, report: Report) -> None:
    """Seconds of forward and backward of attention that gathers rows over those of FlexAttention, in bfloat16: a long prompt with
    many short completions.
    """
    model = random_model(machine, layers=machine.size(8, 1))
    rows = random_rows(model, 16, machine.size(4096, 16), machine.size(512, 8), group=16)
    seconds, details = {}, {}
    for kernel in KERNELS:
        model.set_attn_implementation(_kernel(machine, kernel))
        seconds[kernel], peak = median_backward(machine, Passes(model, shared_prefix="on", autocast=torch.bfloat16), rows)
        details |= {f"{kernel}_s": seconds[kernel], f"{kernel}_peak_gb": peak / GB}
    _refuse_dry(machine)
    gathered, flexible = (seconds[kernel] for kernel in KERNELS)
    report(gathered / flexible, details)


def _gradient(passes: Passes, rows: Experience) -> Tensor:
    backward(passes, rows)
    gradient = torch.cat([weight.grad.flatten() for weight in passes.model.parameters()])
    passes.model.zero_grad()
    return gradient


def _kernel(machine: Machine, name: str) -> str:
    return "sdpa" if machine.dry else name


def _refuse_dry(machine: Machine) -> None:
    if machine.dry:
        raise Skipped("FlexAttention has no backward pass on CPUs")


def budget(machine: Machine, report: Report) -> None:
    """Peak of memory per token of the budget in lines that share prompts, over that in padded rows of the same cost: the largest
    of three shapes, with and without gradient checkpointing. The vocabulary is small, so that the head needs little.
    """
    tokens, shapes = machine.size(16384, 128), ((16, 4, 8), (16, 8, 4)) if machine.dry else MANY_ROWS
    prompt, completion = machine.size(256, 16), machine.size(64, 8)
    ratios, details = [], {}
    for checkpointing in (False, True):
        model = random_model(machine, layers=machine.size(8, 1), vocabulary=machine.size(4096, 512))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        shared, padded = (Passes(model, shared_prefix=each, autocast=torch.bfloat16) for each in ("on", "off"))
        for shape in shapes:
            one = random_rows(model, shape[1], shape[0], shape[2], group=shape[1])
            shared.prepare(shape[0] + shape[2])
            groups = max(1, tokens // _cost(shared, one))
            lines = random_rows(model, groups * shape[1], shape[0], shape[2], group=shape[1])
            cost = _cost(shared, lines)
            rows = random_rows(model, max(1, round(cost / (prompt + completion))), prompt, completion)
            peaks = [_peak(machine, shared, lines) / cost, _peak(machine, padded, rows) / _cost(padded, rows)]
            ratios.append(peaks[0] / max(1, peaks[1]))
            name = "×".join(map(str, shape)) + (" checkpointing" if checkpointing else "")
            details[name] = {"ratio": ratios[-1], "cost": cost, "kb_per_token": [peak / 1e3 for peak in peaks]}
            report.so_far(max(ratios), details)
    if machine.dry:
        raise Skipped("memory is not measured on a CPU")
    report(max(ratios), details)


def _cost(passes: Passes, rows: Experience) -> int:
    return passes.cost(rows.prompt_ids, rows.completion_mask.sum(-1).tolist(), rows.group_id.tolist())


def _peak(machine: Machine, passes: Passes, rows: Experience) -> int:
    """Bytes that forward and backward take at most, beside weights and gradients."""
    backward(passes, rows)
    passes.model.zero_grad(set_to_none=False)
    with watched(machine) as watch:
        backward(passes, rows)
    return watch.peak_bytes


def _group(machine: Machine, model: Any) -> Experience:
    return random_rows(model, 8, machine.size(1024, 16), machine.size(512, 8), group=8)
