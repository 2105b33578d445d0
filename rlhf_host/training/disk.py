"""Room that a run's checkpoints will take on the disk, told before it starts."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_host.config.schema import CheckpointConfig, RunConfig
from rlhf_host.directories import amount
from rlhf_host.models.meta_model import weights_of
from rlhf_host.protocols import RuntimeStart
from rlhf_host.training.trained_roles import saved_roles

WHILE_RUNNING = 2
"""Newest checkpoints that stay by default while a run goes on: a damaged one has one before it."""


def checkpoint_bytes(start: RuntimeStart, outlines: Mapping[str, Any]) -> float | None:
    """Returns the bytes of the weights and optimizers in a checkpoint; None: a model cannot be looked at, or the backend does not
    tell.

    Args:
        outlines: those of the roles' models.
    """
    backend: Any = start.backend.build()
    total = 0.0
    for need in saved_roles(start.needs):
        role, model = start.roles[need.name], outlines[need.name]
        if model is None or not backend.traits.saved_bytes:
            return None
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        whole = sum(weight.numel() * width for weight, width in weights_of(role, model))
        total += sum(weight.nbytes for weight in trained) if role.adapts else whole
        total += backend.traits.saved_bytes * sum(weight.numel() for weight in trained)
    return total


def at_most(settings: CheckpointConfig, steps: int) -> int:
    """Returns how many checkpoints there may be at a time, with the one that is being written and one that a resume began with."""
    if settings.keep == 0:
        regular = steps // settings.every if settings.every else 0
        return steps + 2 if settings.best else regular + 2  # one before the first step too
    kept = (settings.keep or WHILE_RUNNING) if settings.every else 1
    return kept + 1 + (settings.best is not None)


def told(config: RunConfig, start: RuntimeStart, outlines: Mapping[str, Any], run_dir: Path, steps: int) -> list[str]:
    """Returns lines for people: what checkpoints take, and whether there is room."""
    count = at_most(config.checkpoint, steps)
    if (each := checkpoint_bytes(start, outlines)) is None:
        return [f"checkpoints: at most {count} at a time, of a size that is not known before the first"]
    place = next(path for path in (run_dir, *run_dir.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    line = f"checkpoints: {amount(each)} each, at most {count} at a time; {amount(free)} are free in {place}"
    if count * each > free:
        line += ": too little; make room, or raise --checkpoint.every, or set --checkpoint.keep 1"
    return [line]
