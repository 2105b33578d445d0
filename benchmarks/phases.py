"""Seconds per phase of a step: Ray, with and without DeepSpeed and vLLM, beside the local runtime at equal threads, in turn.

    python benchmarks/phases.py                              # 0.6M-parameter Llama made on the spot, 16 x 8 x 32 tokens
    python benchmarks/phases.py --threads 1 --runtime local --runtime ray-vllm --case smollm2

The cases are those of ``step_vs_trl.py``, which sets the step beside TRL's (``--runtime ray``). ``--threads 2`` means two threads
in the local runtime, and on Ray two ranks and two engines of one thread each: the two kinds take turns. Each number is the median
over all steps but every run's first; ``host`` is all that is no model work, on Ray with what waits for messages.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from step_vs_trl import CASES, RUNTIMES, our_steps, prepare

PHASES = ("rollout", "logprobs", "advantages", "train", "sync", "log", "step", "host")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=sorted(CASES), default="tiny-fixed")
    parser.add_argument("--runtime", action="append", choices=RUNTIMES, help="repeatable; default: all")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each, in turn")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--model", help="model directory for the case smollm2")
    options = parser.parse_args()
    case, runtimes = CASES[options.case], options.runtime or list(RUNTIMES)
    rows: dict[str, list[dict[str, float]]] = {runtime: [] for runtime in runtimes}
    with tempfile.TemporaryDirectory() as folder:
        inputs = prepare(case, Path(folder), options.model)
        for number in range(options.rounds):
            for runtime in runtimes:
                ours = argparse.Namespace(runtime=runtime, threads=options.threads, device="cpu", vllm=False)
                rows[runtime] += our_steps(case, inputs, Path(folder) / f"{runtime}-{number}", ours)
    seconds = {
        runtime: {phase: round(statistics.median(row[f"time/{phase}"] for row in found), 4) for phase in PHASES}
        for runtime, found in rows.items()
    }
    print(f"| | {' | '.join(runtimes)} |")
    print("|---" * (len(runtimes) + 1) + "|")
    for phase in PHASES:
        print(f"| {phase} | {' | '.join(f'{seconds[runtime][phase]:.3f}' for runtime in runtimes)} |")
    print(json.dumps({"benchmark": "phases", **vars(options), "seconds": seconds}))


if __name__ == "__main__":
    main()
