"""A prompt that a group of 8 shares: how much faster its update is, and whether the gradient is the same."""

from __future__ import annotations

import statistics
from typing import Any, Literal

import torch
from torch import Tensor

from gpu_parts.machine import GB, Machine, random_model, random_rows, watched
from rlhf_host.models.passes import Passes
from rlhf_host.records.tensors import Experience
from rlhf_host.training.role import rows_of

SETTINGS: tuple[Literal["off", "on"], ...] = ("off", "on")


def gain(machine: Machine) -> tuple[float, dict[str, Any]]:
    """Seconds of forward and backward without sharing over those with it, in bfloat16."""
    model = random_model(machine)
    rows, seconds, details = _group(machine, model), {}, {}
    for shared in SETTINGS:
        passes, times = Passes(model, shared_prefix=shared, autocast=torch.bfloat16), []
        for number in range(machine.size(6, 2)):
            with watched(machine) as watch:
                _backward(passes, rows)
            if number:
                times.append(watch.seconds)
            model.zero_grad()
        seconds[shared] = statistics.median(times)
        details |= {f"{shared}_s": seconds[shared], f"{shared}_peak_gb": watch.peak_bytes / GB}
    return seconds["off"] / seconds["on"], details


def gradient(machine: Machine) -> tuple[float, dict[str, Any]]:
    """Relative distance of the two gradients, in float32."""
    model = random_model(machine, layers=4)
    rows, gradients = _group(machine, model), []
    for shared in SETTINGS:
        _backward(Passes(model, shared_prefix=shared), rows)
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
        model.zero_grad()
    padded, shared_one = gradients
    return float((shared_one - padded).norm() / padded.norm()), {"norm": float(padded.norm())}


def _group(machine: Machine, model: Any) -> Experience:
    return random_rows(model, 8, machine.size(1024, 16), machine.size(512, 8), group=8)


def _backward(passes: Passes, rows: Experience) -> Tensor:
    logprobs = passes.forward(**rows_of(rows)).logprobs
    assert logprobs is not None
    assert rows.advantages is not None
    loss = -(rows.advantages.to(logprobs.device) * logprobs).mean()
    loss.backward()
    return loss
