"""A step against TRL's ``GRPOTrainer`` on the same GPU, by ``benchmarks/step_vs_trl.py``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from gpu_parts.machine import Machine, Report, Skipped, require

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks/step_vs_trl.py"


def ratio(
    machine: Machine, report: Report, *, peer: Literal["continuous", "generate", "vllm"] = "continuous", case: str = "1b"
) -> None:
    """TRL's seconds per step over ours: 1.1B parameters, by default 16 prompts × 8 samples × 256 tokens.

    Args:
        peer: how TRL samples: with transformers' continuous batching, where its weights become bfloat16; with ``generate``; with
            vLLM on the same GPU, as ours then does too. With Liger's kernels and loss but for ``generate``, which is TRL's default.
    """
    if peer == "vllm" and importlib.util.find_spec("vllm") is None:
        raise Skipped("vllm is not installed here")
    if machine.peer_python is None:
        raise Skipped("it needs trl, installed here or in the environment of --peer-python")
    require("rlhf-plugin-rloo")
    benchmark, threads = _benchmark(), os.cpu_count() or 1
    name = "smoke" if machine.dry else case
    options = argparse.Namespace(
        peer_python=machine.peer_python,
        rounds=machine.size(machine.rounds, 1),
        device=machine.device.type,
        threads=threads,
        kernels=None,
        model=None,
        runtime="local",
        vllm=peer == "vllm",
        continuous_batching=peer == "continuous",
        liger=peer != "generate",
    )
    chosen = replace(benchmark.CASES[name], steps=machine.size(machine.steps, 2))

    def so_far(result: dict[str, Any]) -> None:
        report.so_far(result["ratio"], result)

    try:
        with tempfile.TemporaryDirectory() as folder:
            peak = benchmark.matmul_gflops(threads)
            result = benchmark.compare(name, chosen, Path(folder), options, peak, so_far)
    except SystemExit as error:
        if machine.dry and "object has no attribute 'weight_loader'" in str(error):
            raise Skipped("our side runs; TRL's sync does not, because vLLM for CPUs has repacked its weights") from None
        raise RuntimeError(str(error)) from error
    report(result["ratio"], result)


def _benchmark() -> Any:
    """The benchmark as a module, beside those that it imports."""
    if str(BENCHMARK.parent) not in sys.path:
        sys.path.append(str(BENCHMARK.parent))
    return importlib.import_module(BENCHMARK.stem)
