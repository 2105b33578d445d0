"""Measurements that only a GPU can give: parts, each with one or several figures that have a number to meet.

    python scripts/gpu_accept.py --list
    python scripts/gpu_accept.py --seconds 600 --results figures.json     # what is worth most in these seconds
    python scripts/gpu_accept.py --call first                             # one of the three calls of a machine lent for minutes
    python scripts/gpu_accept.py --part NAME ... [--peer-python PATH]
    python scripts/gpu_accept.py --dry          # on the CPU, tiny: does every part run?

Parts run in the order of what they are worth per second, each for at most 8 minutes: those that need a model one after the other
in one process, others in a process of their own. A part whose estimate does not fit into what is left of ``--seconds`` is
skipped.

Each figure is one JSON object on a line: ``part`` (the figure), ``value``, ``limit``, ``ok`` (null where it was not judged),
``skipped`` (why) or ``error``, ``seconds``, ``details``. After each repetition comes such a line with ``partial``; the last line of
a figure counts. A part whose time is over is ended, and its latest partial line counts, with ``cut``. What else parts say goes to
stderr, and at the end a table and how many numbers were met, missed and not judged: what was skipped was not judged. Leaves with 1
if a number was missed or a part failed. ``--results`` writes a file that can be sent: the figures with commit, device and versions.

Where ``OUT`` names a folder, ``OUT/figures.json`` is that file, and ``OUT/caches`` is where vLLM, Triton and torch keep what they
compile: carried to the next call, it saves them the time.

Needs torch, transformers and accelerate, and of the host's own dependencies pluggy, pydantic, ruamel.yaml, importlib-metadata,
click, rich, packaging and safetensors: not vllm, ray, deepspeed, peft or datasets. To a machine that cannot install anything, carry
the wheels that it lacks: rlhf-host, rlhf-authoring, rlhf-plugin-rloo, rlhf-plugin-shapes, rlhf-kernels with rlhf-kernels-triton and
rlhf-kernels-liger (``make wheels``), pluggy 1.7, pydantic with pydantic-core, annotated-types and typing-inspection, ruamel.yaml,
importlib-metadata with zipp and lazy-importer. The code that runs is the checkout's, whatever is in the wheel of rlhf-host. Parts
``trl-*`` need trl, here or in the environment of ``--peer-python``.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, before what is installed

CACHES = {"VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
"""Environment variable → folder below ``OUT/caches``."""
OUT = os.environ.get("OUT")
if OUT:  # before torch is imported
    for variable, folder in CACHES.items():
        os.environ.setdefault(variable, str(Path(OUT, "caches", folder).resolve()))

try:
    import torch
    from gpu_parts import measuring
    from gpu_parts.figures import FigureFile, UnfitFile, carried, summary, table
    from gpu_parts.machine import Machine
    from gpu_parts.table import CALL_ROUNDS, CALL_STEPS, CALLS, PARTS, START_S, Part
except ModuleNotFoundError as error:
    print(f"{error}: install it, or carry its wheel along (see the first lines of {__file__})", file=sys.stderr)
    sys.exit(2)

LONGEST_S = 480.0


def main() -> None:
    options = _options()
    if options.list:
        print("\n".join(_described(part) for part in PARTS))
        return
    if not options.dry and not torch.cuda.is_available():
        print("no CUDA device here: run this where torch.cuda.is_available() is true, or with --dry", file=sys.stderr)
        sys.exit(2)
    peer = options.peer_python or (sys.executable if importlib.util.find_spec("trl") else None)
    machine = Machine(options.dry, options.peak_tflops, peer, options.rounds, options.steps)
    if options.serve:
        measuring.serve(PARTS, machine)
        return
    path = options.results or (Path(OUT, "figures.json") if OUT else None)
    try:
        file = FigureFile(path, dry=options.dry, commit=options.commit) if path else None
    except UnfitFile as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run = _Run(options, machine, file)
    try:
        for parts, limit_s, title in _plans(options):
            run.measure(parts, limit_s)
            print(f"\n{title}\n{table(parts, run.results)}" if title else f"\n{table(parts, run.results)}", file=sys.stderr)
    except UnfitFile as error:  # such as a disk that is full now
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        run.close()
        if run.results:
            print(summary(run.results.values(), machine.dry), file=sys.stderr)
    if any(result["ok"] is False for result in run.results.values()):
        sys.exit(1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_mutually_exclusive_group()
    names = [part.name for part in PARTS]
    chosen.add_argument("--part", nargs="+", choices=names, metavar="NAME", default=names, help="default: all; see --list")
    chosen.add_argument("--call", nargs="+", choices=list(CALLS), help="the parts of a call, within its limit")
    parser.add_argument("--list", action="store_true", help="name the parts, their seconds, and what their figures must meet")
    parser.add_argument("--seconds", type=float, help="end within these, and skip what does not fit")
    parser.add_argument("--results", type=Path, help="file of results; one of the same commit and device is added to")
    parser.add_argument("--commit", help="of this checkout, for --results, where git cannot say it")
    parser.add_argument("--dry", action="store_true", help="on the CPU with tiny sizes; speed and memory are not judged")
    parser.add_argument("--pieces", nargs="+", type=Path, default=[], help="folder that each call carries: say how many bytes")
    parser.add_argument("--here", action="store_true", help="in this process and without a time limit, for a debugger")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--peer-python", help="Python of an environment with torch and trl (default: this one, if it has trl)")
    parser.add_argument("--rounds", type=int, help="runs of each side beside TRL (default: 2, in a call 1)")
    parser.add_argument("--steps", type=int, help="steps of each of these runs, at least 2 (default: 5, in a call 4)")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="of the GPU in dense bfloat16 (default: H100, H200)")
    options = parser.parse_args()
    for name, least in (("rounds", 1), ("steps", 2), ("seconds", 0)):
        if (value := getattr(options, name)) is not None and not value >= least:
            parser.error(f"--{name}: at least {least}, not {value:g}")
    if not 0 < options.peak_tflops < math.inf:
        parser.error(f"--peak-tflops: a number above 0, not {options.peak_tflops:g}")
    if options.peer_python and not shutil.which(options.peer_python):
        parser.error(f"--peer-python: {options.peer_python} is no program")
    if len(options.pieces) > len(options.call or ()):
        parser.error("--pieces: one folder for each --call, in their order")
    if lacking := [str(folder) for folder in options.pieces if not folder.is_dir()]:
        parser.error(f"--pieces: {lacking[0]} is no folder")
    options.rounds = options.rounds or (CALL_ROUNDS if options.call else 2)
    options.steps = options.steps or (CALL_STEPS if options.call else 5)
    return options


def _described(part: Part) -> str:
    lines = [f"{figure.name:24}{figure.limit:10}{figure.about}" for figure in part.figures]
    return "\n".join([f"{lines[0]} [{part.name}, {part.seconds:g} s]", *lines[1:]])


def _plans(options: argparse.Namespace) -> list[tuple[list[Part], float, str]]:
    """Parts to measure one after the other, the seconds that they may take together, and a line about them."""
    if not options.call:
        return [([part for part in PARTS if part.name in options.part], float("inf"), "")]
    plans = []
    for call, pieces in itertools.zip_longest(options.call, options.pieces):
        parts = sorted(
            (part for part in PARTS if part.name in CALLS[call].parts), key=lambda p: CALLS[call].parts.index(p.name)
        )
        limit_s = float("inf") if options.dry else CALLS[call].seconds
        plans.append((parts, limit_s, carried(call, parts, pieces)))
    return plans


class _Run:
    """Measures parts as long as there is time, and has the last result of each figure."""

    def __init__(self, options: argparse.Namespace, machine: Machine, file: FigureFile | None):
        self.results: dict[str, measuring.Result] = {}
        self._machine, self._file, self._here = machine, file, options.here
        self._lines = sys.stdout  # what parts print goes elsewhere
        self._ends = time.monotonic() + (float("inf") if options.seconds is None else options.seconds)
        self._apart = measuring.Apart(_command(machine))

    def measure(self, parts: list[Part], limit_s: float) -> None:
        ends = min(self._ends, time.monotonic() + limit_s)
        for part in parts:
            left = ends - time.monotonic()
            needed = part.seconds + (0 if self._apart.is_there_for(part) else START_S)
            if needed > left:
                self._skip(part, f"its estimate of {needed:.0f} s does not fit into the {max(0.0, left):.0f} s that are left")
            elif self._here:
                measuring.measure(part, self._machine, self._take)
            else:
                self._apart.measure(part, self._machine, min(LONGEST_S, left), self._take)

    def close(self) -> None:
        self._apart.close(kill=True)

    def _skip(self, part: Part, reason: str) -> None:
        for figure in part.figures:
            self._take({"part": figure.name, "value": None, "limit": figure.limit, "ok": None, "skipped": reason})

    def _take(self, result: measuring.Result) -> None:
        print(json.dumps(result), file=self._lines, flush=True)
        self.results[result["part"]] = result
        if self._file is not None:
            self._file.add(result)


def _command(machine: Machine) -> list[str]:
    command = [sys.executable, __file__, "--serve", "--peak-tflops", str(machine.peak_tflops)]
    command += ["--rounds", str(machine.rounds), "--steps", str(machine.steps), *["--dry"] * machine.dry]
    return command + (["--peer-python", machine.peer_python] if machine.peer_python else [])


if __name__ == "__main__":
    main()
