"""A step against TRL's ``GRPOTrainer`` on the same GPU, by ``benchmarks/step_vs_trl.py``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu_parts.machine import Machine, Skipped, require

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks/step_vs_trl.py"


def ratio(machine: Machine, *, vllm: bool = False) -> tuple[float, dict[str, Any]]:
    """TRL's seconds per step over ours: 1.1B parameters, 16 prompts × 8 samples × 256 tokens.

    Args:
        vllm: both sides sample with vLLM on the same GPU, and TRL takes Liger's loss.
    """
    if vllm and importlib.util.find_spec("vllm") is None:
        raise Skipped("vllm is not installed here")
    if machine.peer_python is None:
        raise Skipped("it needs --peer-python, the Python of an environment with torch and trl")
    require("rlhf-plugin-rloo")
    benchmark, case, threads = _benchmark(), "smoke" if machine.dry else "1b", os.cpu_count() or 1
    options = argparse.Namespace(
        peer_python=machine.peer_python, rounds=machine.size(2, 1), device=machine.device.type, threads=threads
    )
    options.kernels, options.model, options.runtime, options.vllm = None, None, "local", vllm
    try:
        with tempfile.TemporaryDirectory() as folder:
            peak = benchmark.matmul_gflops(threads)
            result = benchmark.compare(case, benchmark.CASES[case], Path(folder), options, peak)
    except SystemExit as error:
        raise RuntimeError(str(error)) from error
    return float(result.pop("ratio")), result


def _benchmark() -> Any:
    """The benchmark as a module, beside those that it imports."""
    if str(BENCHMARK.parent) not in sys.path:
        sys.path.append(str(BENCHMARK.parent))
    return importlib.import_module(BENCHMARK.stem)
