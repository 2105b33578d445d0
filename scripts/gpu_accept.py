"""Measurements that only a GPU can give: thirty-one parts, each with a number to meet.

    python scripts/gpu_accept.py --list
    python scripts/gpu_accept.py [--part NAME ...] [--peer-python PATH] > figures.jsonl
    python scripts/gpu_accept.py --dry          # on the CPU, tiny: does every part run?

Each part runs in a process of its own for at most 8 minutes and prints one JSON object: ``part``, ``value``, ``limit``, ``ok``
(null where it was not judged), ``skipped`` (why) or ``error``, ``seconds``, ``details``. What else parts say goes to stderr, and at
the end how many numbers were met, missed and not judged: what was skipped was not judged. Leaves with 1 if a number was missed or a
part failed.

Needs torch, transformers and accelerate, and of the host's own dependencies pluggy, pydantic, ruamel.yaml, importlib-metadata,
click, rich, packaging and safetensors: not vllm, ray, deepspeed, peft or datasets. To a machine that cannot install anything, carry
the wheels that it lacks: rlhf-host, rlhf-authoring, rlhf-plugin-rloo, rlhf-plugin-shapes, rlhf-kernels and rlhf-kernels-liger
(``make wheels``), pluggy 1.7, pydantic with pydantic-core, annotated-types and typing-inspection, ruamel.yaml, importlib-metadata
with zipp and lazy-importer. The code that runs is the checkout's, whatever is in the wheel of rlhf-host. ``trl`` needs
``--peer-python``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, before what is installed

try:
    import torch
    from gpu_parts import against_trl, ipc, logprobs, nccl, offload, pictures, prefix, runs, sampling, throughput, with_vllm
    from gpu_parts.machine import Machine, Skipped
except ModuleNotFoundError as error:
    sys.exit(f"{error}: install it, or carry its wheel along (see the first lines of {__file__})")

LONGEST_S = 480.0


@dataclass(frozen=True)
class Part:
    """A number, and what it has to be."""

    name: str
    about: str
    measure: Callable[[Machine], tuple[float, dict[str, Any]]]
    """The number, and what else is worth knowing. Raises ``Skipped`` where it cannot be had."""
    at_least: float = float("-inf")
    at_most: float = float("inf")
    everywhere: bool = False
    """It must be met in a dry run too, because it is no matter of speed or size."""

    @property
    def limit(self) -> str:
        return f"<= {self.at_most:g}" if self.at_least == float("-inf") else f">= {self.at_least:g}"

    def met(self, value: float) -> bool:
        return self.at_least <= value <= self.at_most


PARTS = [
    Part(
        "mfu-1.5b",
        "part of the peak that training reaches, 1.5B parameters, micro-batches of 16k tokens, gradient checkpointing",
        partial(throughput.mfu, size="1.5b", checkpointing=True),
        at_least=0.35,
    ),
    Part(
        "mfu-3b",
        "the same with 3B parameters",
        partial(throughput.mfu, size="3b", checkpointing=True),
        at_least=0.35,
    ),
    Part(
        "liger-gain",
        "how many times faster 8 × 2048 tokens of 1.5B are with Liger's kernels",
        throughput.liger_gain,
        at_least=1.0,
    ),
    Part(
        "logprobs",
        "GB above the hidden states for log-probabilities of 16k tokens at a vocabulary of 152k",
        logprobs.memory,
        at_most=2.5,
    ),
    Part(
        "logits",
        "seconds of a head of 7B, forward and backward, over those of its matrix products alone",
        logprobs.speed,
        at_most=1.3,
    ),
    Part(
        "prefix-gain",
        "how many times faster a group of 8 × (1024 + 512) tokens is with a shared prompt",
        prefix.gain,
        at_least=1.5,
    ),
    Part(
        "prefix-gradient",
        "relative distance of its gradient from the one without sharing, float32",
        prefix.gradient,
        at_most=1e-3,
        everywhere=True,
    ),
    Part(
        "flex-gain",
        "how many times faster a group of 16 × (4096 + 512) tokens is under FlexAttention than where attention gathers rows",
        prefix.flex_gain,
        at_least=1.5,
    ),
    Part(
        "flex-gradient",
        "relative distance of its gradient from the one that gathers, float32",
        prefix.flex_gradient,
        at_most=1e-3,
    ),
    Part(
        "budget",
        "memory per token of the budget of lines with up to 64 completions, over that of padded rows",
        prefix.budget,
        at_most=1.15,
    ),
    Part(
        "pictures-gradient",
        "relative distance of the gradient of a group with pictures from that of plain transformers, float32",
        pictures.gradient,
        at_most=1e-3,
        everywhere=True,
    ),
    Part(
        "pictures-gain",
        "how many times faster a group of 8 × 512 tokens with a picture of 1024 tokens is than in plain transformers",
        pictures.gain,
        at_least=1.5,
    ),
    Part("pictures-run", "share of right held-out answers after 60 steps on drawn pictures", pictures.learns, at_least=0.9),
    Part("engine", "tokens per second of the embedded engine over those of generate", sampling.speed, at_least=1.0),
    Part(
        "mismatch",
        "largest gap between sampler's and trainer's log-probability of a token, bfloat16, in nats",
        sampling.mismatch,
        at_most=sampling.ROUGH_TOLERANCE,
        everywhere=True,
    ),
    Part("ipc", "GB of weights per second to an engine's process on the same GPU", ipc.rate, at_least=20.0),
    Part(
        "ipc-bf16",
        "the same where the engine keeps weights in bfloat16, of bytes that are sent",
        partial(ipc.rate, dtype=torch.bfloat16),
        at_least=100.0,
    ),
    Part(
        "ipc-killed",
        "seconds until a sync to two engines fails after one was killed; the next must work",
        ipc.killed,
        at_most=10.0,
        everywhere=True,
    ),
    Part(
        "nccl-forming",
        "seconds until the trainer trains again after a receiver was killed before a communicator was formed",
        nccl.forming,
        at_most=10.0,
        everywhere=True,
    ),
    Part(
        "nccl-abort",
        "the same where it is killed in mid-sync; with two GPUs",
        nccl.abort,
        at_most=10.0,
        everywhere=True,
    ),
    Part("offload", "part of weights and optimizer state that offload frees", offload.freed, at_least=0.7),
    Part("pinned", "GB per second of offload and reload through pinned memory, the slower way", offload.rate, at_least=20.0),
    Part("growth", "relative growth of reserved memory over the last 25 of 50 steps", runs.growth, at_most=0.02),
    Part(
        "resume",
        "largest difference of a weight after a resume, beyond that of two equal runs",
        runs.resume,
        at_most=0.0,
        everywhere=True,
    ),
    Part("vllm-bare", "tokens per second of the engine vllm over those of bare vLLM", with_vllm.over_bare, at_least=0.95),
    Part(
        "vllm-process",
        "tokens per second with vLLM's core in a process of its own over those with the core in this one",
        with_vllm.own_process,
        at_least=1.0,
    ),
    Part(
        "vllm-phases",
        "memory of an engine whose weights alone are awake over the bytes of these weights",
        with_vllm.phases,
        at_most=1.15,
    ),
    Part(
        "vllm-seeds",
        "tokens per second with a seed for each request over those without seeds",
        with_vllm.seeds,
        at_least=0.9,
    ),
    Part("colocated-sync", "seconds of a sync of 1.5B in bfloat16 to vLLM on the same GPU", with_vllm.sync, at_most=0.15),
    Part("trl", "seconds per step of TRL over ours", against_trl.ratio, at_least=1.5),
    Part(
        "trl-vllm",
        "the same, both with vLLM on the same GPU, TRL with Liger",
        partial(against_trl.ratio, vllm=True),
        at_least=1.0,
    ),
]
NAMES = [part.name for part in PARTS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=NAMES, metavar="NAME", default=NAMES, help="default: all; see --list")
    parser.add_argument("--list", action="store_true", help="name the parts and what they must meet")
    parser.add_argument("--dry", action="store_true", help="on the CPU with tiny sizes; speed and memory are not judged")
    parser.add_argument("--here", action="store_true", help="in this process and without a time limit, for a debugger")
    parser.add_argument("--peer-python", help="Python of an environment with torch and trl; without it trl is skipped")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="of the GPU in dense bfloat16 (default: H100, H200)")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{part.name:16} {part.limit:9} {part.about}" for part in PARTS))
        return
    if not options.dry and not torch.cuda.is_available():
        sys.exit("no CUDA device here: run this where torch.cuda.is_available() is true, or with --dry")
    machine = Machine(dry=options.dry, peak_tflops=options.peak_tflops, peer_python=options.peer_python)
    results = []
    for part in PARTS:
        if part.name in options.part:
            results.append(measure(part, machine) if options.here else measure_apart(part, machine))
            print(json.dumps(results[-1]), flush=True)
    if not options.here:
        print(summary(results, machine), file=sys.stderr)
    if any(result["ok"] is False for result in results):
        sys.exit(1)


def summary(results: list[dict[str, Any]], machine: Machine) -> str:
    """Returns how many parts met their number; a part that was skipped did not."""
    names = {ok: [result["part"] for result in results if result["ok"] is ok] for ok in (True, False, None)}
    counts = [f"{len(names[ok])} {text}" for ok, text in ((True, "met"), (False, "missed or failed"), (None, "not judged"))]
    notes = [f"not judged: {', '.join(names[None])}"] if names[None] else []
    return "; ".join([", ".join(counts), *notes, *(["a dry run on the CPU, which judges nothing about a GPU"] * machine.dry)])


def measure(part: Part, machine: Machine) -> dict[str, Any]:
    """The part's JSON object."""
    started = time.perf_counter()
    device = "cpu, dry run" if machine.dry else torch.cuda.get_device_name()
    result: dict[str, Any] = {"part": part.name, "value": None, "limit": part.limit, "ok": None, "device": device}
    try:
        with contextlib.redirect_stdout(sys.stderr):
            result["value"], result["details"] = part.measure(machine)
        result["ok"] = part.met(result["value"]) if part.everywhere or not machine.dry else None
    except Skipped as reason:
        result["skipped"] = str(reason)
    except Exception as error:
        traceback.print_exc()
        result |= {"ok": False, "error": f"{type(error).__name__}: {error}"}
    return result | {"seconds": round(time.perf_counter() - started, 1)}


def measure_apart(part: Part, machine: Machine) -> dict[str, Any]:
    """The same from a process of its own, so that no part sees another's memory, and none takes longer than it may."""
    command = [sys.executable, __file__, "--here", "--part", part.name, "--peak-tflops", str(machine.peak_tflops)]
    command += ["--dry"] * machine.dry + (["--peer-python", machine.peer_python] if machine.peer_python else [])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=LONGEST_S)
        return json.loads(output.splitlines()[-1])
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its engines and runs too
        process.wait()
        problem = f"not done after {LONGEST_S:g} s"
    except (IndexError, ValueError):
        problem = f"its process ended with {process.returncode} and said nothing"
    return {"part": part.name, "value": None, "limit": part.limit, "ok": False, "error": problem}


if __name__ == "__main__":
    main()
