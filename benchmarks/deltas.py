"""Bytes of each step that the weight sync ``delta`` writes, beside all weights, and the time to write and rebuild them.

    make smollm2
    python benchmarks/deltas.py                          # SmolLM2-135M in bfloat16, learning rates 1e-6 and 1e-5, 4 steps each
    python benchmarks/deltas.py --lr 1e-7 --steps 8

Each run is RLOO on a dense reward, the share of vowels, so that no step is without a gradient. The model is trained in float32 and
sampled by the embedded engine; its weights are kept in the type that an engine in bfloat16 would get. ``changed`` is the share of
values whose bits differ from the step before, ``packed`` what is written, ``plain`` the same without zlib, and ``whole`` all
weights, those under two names counted once. Every step is rebuilt and compared with the hash that was written.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import rlhf_host

MODEL = Path(__file__).resolve().parent.parent / "models" / "SmolLM2-135M-Instruct"
DATA = [{"prompt": f"Write one sentence about {what}."} for what in ("the sea", "a garden", "winter", "an old house")]


def vowels(completions: list[str], **_: Any) -> list[float]:
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]


def measure(run: Path, lr: float, steps: int, threads: int) -> None:
    """Trains, and prints a row per step."""
    from rlhf_sync_delta.files import path_of, read, rebuild
    from rlhf_sync_delta.states import bits_of

    rlhf_host.train(
        algo="rloo",
        rewards=vowels,
        model=MODEL,
        data=DATA,
        sync={"name": "delta", "dtype": "bfloat16"},
        rollout={"n": 4, "max_new_tokens": 16},
        train={"steps": steps, "batch_size": 2, "threads": threads},
        actor={"lr": lr, "warmup_steps": 0},
        checkpoint={"every": 0, "final": False},
        run_dir=run,
    )
    times = {row["step"]: row["time/sync"] for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}
    before = rebuild(run / "deltas", 0)
    for step in range(1, steps + 1):
        began = time.perf_counter()
        state = rebuild(run / "deltas", step)
        seconds = time.perf_counter() - began
        record = read(path_of(run / "deltas", step, "delta"))
        assert state.hash == record.hash
        moved = sum(int((bits_of(before.tensors[name]) != bits_of(now)).sum()) for name, now in state.tensors.items())
        values = sum(tensor.numel() for tensor in state.tensors.values())
        packed, plain, whole = record.path.stat().st_size, len(record.payload), state.bytes
        sizes = [f"{size / 1e6:.2f}" for size in (packed, plain, whole)]
        row = [
            f"{lr:g}",
            str(step),
            f"{moved / values:.2%}",
            *sizes,
            f"{packed / whole:.2%}",
            f"{times[step]:.1f}",
            f"{seconds:.1f}",
        ]
        print("| " + " | ".join(row) + " |", flush=True)
        before = state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    print("| learning rate | step | changed | packed (MB) | plain (MB) | whole (MB) | of the whole | sync (s) | rebuild (s) |")
    print("|---|---|---|---|---|---|---|---|---|")
    for lr in args.lr:
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder) / "run", lr, args.steps, args.threads)


if __name__ == "__main__":
    main()
