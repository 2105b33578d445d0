"""How much memory a backend gives back while engines sample, how fast, and whether it is taken up again unchanged."""

from __future__ import annotations

import importlib.util
import statistics

import torch

from gpu_parts.machine import GB, Machine, Report, Skipped, held_bytes, random_model, random_rows, update, watched, worker_of
from rlhf_host.backends.torch import Torch
from rlhf_host.config.schema import TrainConfig
from rlhf_host.distributed.deepspeed.plugin import DeepSpeed
from rlhf_host.distributed.split.parking import Parking


def freed(machine: Machine, report: Report) -> None:
    """Part of weights and optimizer state that ``offload`` frees, with DeepSpeed where it is installed, else with torch."""
    with_deepspeed = not machine.dry and importlib.util.find_spec("deepspeed") is not None
    plugin = DeepSpeed(DeepSpeed.Options(zero_stage=2)) if with_deepspeed else Torch(Torch.Options())
    empty, model = held_bytes(machine), random_model(machine)
    rows = random_rows(model, 4, machine.size(256, 8), machine.size(256, 8))
    worker = worker_of(model, TrainConfig(), plugin)
    backend = worker.roles["actor"].backend
    assert backend is not None
    update(worker, rows)
    weights, before = [weight.detach().cpu().clone() for weight in model.parameters()], held_bytes(machine)
    with watched(machine) as away:
        backend.offload()
    moved = before - held_bytes(machine)
    with watched(machine) as back:
        backend.reload()
    with watched(machine) as again:  # into buffers that are there
        backend.offload()
    backend.reload()
    for saved, weight in zip(weights, model.parameters(), strict=True):
        if not torch.equal(saved, weight.detach().cpu()):
            raise RuntimeError("after offload and reload the weights are others")
    update(worker, rows)
    name = type(plugin).__name__
    if moved <= 0:
        raise Skipped(f"the backend {name} moved nothing: only DeepSpeed's does, on a GPU")
    seconds = {"offload_s": away.seconds, "offload_again_s": again.seconds, "reload_s": back.seconds}
    report(moved / (before - empty), {"backend": name, "gb": moved / GB, **seconds})


def rate(machine: Machine, report: Report) -> None:
    """GB per second between the GPU and pinned host memory, the slower way, by the code that a backend's ``offload`` uses; its
    buffers are there. The weights must come back unchanged.
    """
    weights = list(random_model(machine).parameters())
    saved, parking = [weight.detach().cpu().clone() for weight in weights], Parking(weights[0].device)
    size, away, back = sum(weight.nbytes for weight in weights) / GB, [], []
    for _ in range(machine.size(6, 2)):
        with watched(machine) as watch:
            parking.park(weights)
        away.append(watch.seconds)
        if any(weight.untyped_storage().nbytes() for weight in weights):
            raise RuntimeError("weights were left on the device")
        with watched(machine) as watch:
            parking.bring_back()
        back.append(watch.seconds)
    if not all(torch.equal(before, weight.detach().cpu()) for before, weight in zip(saved, weights, strict=True)):
        raise RuntimeError("the weights that came back are others")
    rates = {"away_gb_per_s": size / statistics.median(away[1:]), "back_gb_per_s": size / statistics.median(back[1:])}
    report(min(rates.values()), {"gb": size, **rates, "first_away_s": away[0]})
