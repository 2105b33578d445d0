"""Kernels of an installed package, as a run chooses them: the same gradient as the plain path's, and the time that they save."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import torch
from torch import Tensor

from gpu_parts.machine import GB, Machine, Report, Skipped, random_model, random_rows
from gpu_parts.throughput import backward, median_backward
from rlhf_host.engines.plain_path import PlainKernels
from rlhf_host.models.passes import Passes
from rlhf_host.models.precision import without_tf32
from rlhf_host.plugins.discovery import GROUPS
from rlhf_host.protocols import Kernels
from rlhf_host.records.tensors import Experience


def chosen(name: str) -> Any:
    """Returns kernels by the door of every package of kernels, which compares them with a model before it uses them.

    Raises:
        Skipped: no package has kernels of this name.
    """
    entries = entry_points(group=GROUPS["kernels"], name=name)
    if not entries:
        raise Skipped(f"no kernels {name!r} are installed here: carry the wheel of rlhf-kernels-{name} along")
    from rlhf_kernels import choose

    plugin = next(iter(entries)).load()
    return choose([(name, plugin(plugin.Options()))], PlainKernels())


def refuse_unused(machine: Machine, kernels: Any) -> None:
    """Raises if the comparison refused the kernels: ``Skipped`` on a CPU, ``RuntimeError`` on a GPU."""
    if not any("are used" in line for line in kernels.reports):
        raise (Skipped if machine.dry else RuntimeError)("; ".join(kernels.reports) or "no kernels were tried")


def gain(machine: Machine, report: Report, *, name: str, figure: str = "") -> None:
    """Seconds of forward and backward without kernels over those with them: 8 × 2048 tokens of 1.5B."""
    kernels, model = chosen(name), random_model(machine)
    rows = random_rows(model, 8, machine.size(256, 8), machine.size(1792, 24))
    seconds: dict[str, float] = {}
    details: dict[str, Any] = {}
    for way, used in (("plain", None), (name, kernels)):
        passes = Passes(model, kernels=used, shared_prefix="off", autocast=torch.bfloat16)
        seconds[way], peak = median_backward(machine, passes, rows)
        details |= {f"{way}_s": seconds[way], f"{way}_peak_gb": peak / GB}
    refuse_unused(machine, kernels)
    report(seconds["plain"] / seconds[name], {**details, "reports": kernels.reports}, figure)


def gain_and_equality(machine: Machine, report: Report, *, name: str, figure: str) -> None:
    """The same, and distances of the gradient of 4 layers from the plain path's: in float32 relative to it; in bfloat16 that from
    the plain path in float32, over the distance that the plain path in bfloat16 has from it.
    """
    kernels, model = chosen(name), random_model(machine, layers=4)
    rows = random_rows(model, 8, machine.size(256, 8), machine.size(1792, 24))
    with without_tf32():
        plain, ours = (_gradient(model, rows, used, None) for used in (None, kernels))
    refuse_unused(machine, kernels)
    report(_distance(ours, plain), {"norm": float(plain.norm())}, f"{figure}-float32")
    rounded, ours = (_distance(_gradient(model, rows, used, torch.bfloat16), plain) for used in (None, kernels))
    report(ours / rounded, {"plain": rounded, name: ours}, f"{figure}-bfloat16")
    del model, rows, plain
    gain(machine, report, name=name, figure=figure)


def _gradient(model: Any, rows: Experience, kernels: Kernels | None, autocast: torch.dtype | None) -> Tensor:
    backward(Passes(model, kernels=kernels, shared_prefix="off", autocast=autocast), rows)
    gradient = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    model.zero_grad()
    return gradient


def _distance(gradient: Tensor, plain: Tensor) -> float:
    return float((gradient - plain).norm() / plain.norm())
