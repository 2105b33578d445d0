"""Time of the slowest rank, relative to the mean of all ranks, with rows dealt by tokens and by work.

    python benchmarks/dealing.py

Lognormal lengths cut at 32,768 tokens, ten draws. Work is that of the model's matrices, and of attention to earlier tokens
(``ModelFlops.work``). No model runs.
"""

from __future__ import annotations

import json
import random
import statistics

from rlhf_host.models.flops import ModelFlops
from rlhf_host.training.batching import deal

MODELS = {"1.5B": (1.54e9, 28, 1536), "7B": (7.6e9, 28, 3584), "32B": (32.8e9, 64, 5120), "70B": (70.6e9, 80, 8192)}
"""Weights, layers, and heads times their width."""
CASES = ((8, 128), (48, 512), (512, 4096))
"""Ranks and rows."""


def main() -> None:
    for name, (weights, layers, width) in MODELS.items():
        flops = ModelFlops(body=6 * weights, head=0.0, attention=layers * width)
        for ranks, rows in CASES:
            draws = [slowest(flops, ranks, rows, random.Random(seed)) for seed in range(10)]
            over = {by: round(statistics.mean(draw[by] for draw in draws), 3) for by in ("tokens", "work")}
            print(json.dumps({"model": name, "ranks": ranks, "rows": rows, **over}))


def slowest(flops: ModelFlops, ranks: int, rows: int, dice: random.Random) -> dict[str, float]:
    lengths = [min(32768, int(dice.lognormvariate(8.0, 1.0)) + 200) for _ in range(rows)]
    work = [flops.work(0, [length]) for length in lengths]
    found = {}
    for by, sizes in (("tokens", lengths), ("work", work)):
        loads = [sum(work[row] for [row] in hand) for hand in deal([[row] for row in range(rows)], sizes, ranks)]
        found[by] = max(loads) * ranks / sum(loads)
    return found


if __name__ == "__main__":
    main()
