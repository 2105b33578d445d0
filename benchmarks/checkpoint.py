"""How long a checkpoint stops training, for a model of 113M parameters in float32.

    python benchmarks/checkpoint.py [--steps 6] [--every 1] [--model DIR]

A run in this process writes a checkpoint after every step. Measured is how long the controller is in
``CheckpointKeeper.save``: copying, and waiting for the checkpoint before where that is not written yet. The last one is left
out: the end of a run waits for it. Then the time of a step, beside the writing of a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rlhf_authoring.models import write_tiny_model

import rlhf_host
from rlhf_host.training.keeper import CheckpointKeeper


def length(text: str) -> float:
    return len(text) / 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    seconds: list[float] = []
    save = CheckpointKeeper.save

    def timed(keeper: CheckpointKeeper, **arguments: Any) -> None:
        started = time.perf_counter()
        save(keeper, **arguments)
        seconds.append(time.perf_counter() - started)

    CheckpointKeeper.save = timed  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or write_tiny_model(Path(folder, "model"), hidden=1024, layers=12, heads=8)
        run = rlhf_host.train(
            algo="rloo",
            model=model,
            data="arithmetic",
            rewards={"length": length},
            run_dir=str(Path(folder, "run")),
            **{"rollout.n": 2, "rollout.max_new_tokens": 8, "train.batch_size": 2, "train.steps": options.steps},
            **{"checkpoint.every": options.every, "checkpoint.keep": 1, "kernels": "none", "eval.at_start": False},
        )
        steps = [row["time/step"] for row in run.metrics[1:]]
        files = [file for file in Path(folder, "run/checkpoints/last").resolve().rglob("*") if file.is_file()]
        size = sum(file.stat().st_size for file in files) / 1e9
    rows = {"checkpoint_gb": size, "stopped_s": seconds[:-1], "step_s": steps}
    print(json.dumps(rows | {"median_stopped_s": statistics.median(seconds[:-1]), "median_step_s": statistics.median(steps)}))


if __name__ == "__main__":
    main()
