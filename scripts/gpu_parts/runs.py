"""Whole runs of the host: 50 steps without growth of memory, and a resumed run beside one that was never stopped."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from rlhf_authoring.contracts.reinforce import Reinforce
from rlhf_authoring.models import write_tiny_model
from safetensors.torch import load_file

import rlhf_host
from gpu_parts.machine import GB, Machine, Report, require
from rlhf_host.plugins.discovery import HOST


def growth(machine: Machine, report: Report) -> None:
    """Growth of the memory that torch has reserved, over the second half of the steps, relative; answers of any length."""
    steps, reserved = machine.size(50, 4), []

    class Watch:
        @rlhf_host.hookimpl
        def step_finished(self, step: int) -> None:
            reserved.append(torch.cuda.memory_reserved())
            if len(reserved) % 10 == 0:
                report.so_far(*_growth(reserved))

    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(
            Path(folder, "model"), hidden=machine.size(1024, 32), layers=machine.size(8, 2), heads=machine.size(16, 4)
        )
        new, prompts = machine.size(128, 8), machine.size(16, 2)
        settings = {"extensions": {"watch": Watch()}, "rollout.max_new_tokens": new, "checkpoint.final": False}
        _train(machine, model, Path(folder, "run"), steps, prompts, **settings)
    report(*_growth(reserved))


def resume(machine: Machine, report: Report) -> None:
    """Largest difference of a weight between a resumed run and a whole one, beyond twice that of two whole runs."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    steps = machine.size(6, 2)
    settings = {
        "checkpoint.every": steps // 2,
        "checkpoint.keep": 0,
        "train.autocast": "off",
        "actor.attn_implementation": "eager",
    }
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = write_tiny_model(
                Path(folder, "model"), hidden=machine.size(512, 32), layers=machine.size(8, 2), heads=machine.size(8, 4)
            )
            whole, again, stopped = (Path(folder, name) for name in ("whole", "again", "stopped"))
            for run_dir in (whole, again):
                _train(machine, model, run_dir, steps, machine.size(8, 2), **settings)
            shutil.copytree(whole, stopped)
            shutil.rmtree(stopped / f"checkpoints/step-{steps:06d}")
            shutil.rmtree(stopped / "model")
            rlhf_host.train(resume=stopped, algo=Reinforce, rewards=letters, data=_prompts())
            start, end = _weights(model), _weights(whole / "model")
            gaps = [_gap(_weights(run_dir / "model"), end) for run_dir in (stopped, again)]
    finally:
        torch.use_deterministic_algorithms(False)
    details = {"resumed": gaps[0], "whole_again": gaps[1], "moved": _gap(start, end)}
    report(max(0.0, gaps[0] - 2 * gaps[1]), details)


def _growth(reserved: list[int]) -> tuple[float, dict[str, Any]]:
    middle, last = reserved[len(reserved) // 2 - 1], reserved[-1]
    return (last - middle) / max(1, middle), {"steps": len(reserved), "reserved_gb": [value / GB for value in reserved]}


def letters(text: str, label: str) -> float:
    return sum(map(str.isalpha, text)) / 8


def _train(machine: Machine, model: Path, run_dir: Path, steps: int, prompts: int, **settings: Any) -> None:
    require(HOST)
    rlhf_host.train(
        algo=Reinforce,
        rewards=letters,
        model=model,
        data=_prompts(),
        run_dir=str(run_dir),
        **{
            "actor.device": machine.device.type,
            "actor.lr": 1e-4,
            "rollout.n": machine.size(8, 2),
            "rollout.max_new_tokens": machine.size(64, 4),
            "train.steps": steps,
            "train.batch_size": prompts,
            **settings,
        },
    )


def _prompts() -> list[dict[str, str]]:
    dice = random.Random(0)
    return [{"prompt": "".join(dice.choices("0123456789", k=dice.randint(2, 60))), "label": "7"} for _ in range(1000)]


def _weights(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


def _gap(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    return max(float((ours[name] - value).abs().max()) for name, value in theirs.items())
