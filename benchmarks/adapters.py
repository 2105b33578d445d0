"""What LoRA and QLoRA save: memory, time and bytes to an engine, compared with training all weights.

    python benchmarks/adapters.py [--model DIR] [--rank 16] [--rounds 3] [--json]

Each side trains ``sft`` on the same rows of GSM8K, in a process of its own, in turn. Memory of training is what weights,
gradients and AdamW's two moments take of all that is trained; the peak is that of the whole process. Bytes to an engine are those
of the weights that a sync sends: all, or the adapter's (``--sync.adapter adapter``). Frozen weights are those in memory beside a
LoRA or QLoRA adapter. With ``--json`` the last line is one object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from both_sides import ROOT, flags, run_ours

ROWS = ROOT / "examples/data/gsm8k_sample.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models/SmolLM2-135M-Instruct")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    lora = {"actor.lora.rank": options.rank}
    sides: list[dict[str, Any]] = [{}, lora, lora | {"actor.quantize": "4bit"}]
    runs: list[list[dict[str, Any]]] = [[] for _ in sides]
    for _ in range(options.rounds):
        for side, own in zip(sides, runs, strict=True):
            own.append(train(options, side))
    every = [summary(own) for own in runs]
    sizes = bytes_of(options)
    result = {
        "training_gb": [round(16 * sizes["weights"] / 1e9, 3), round(16 * sizes["trained"] / 1e9, 3)],
        "training_share": round(sizes["trained"] / sizes["weights"], 4),
        "frozen_gb": [round(sizes["bytes"] / 1e9, 3), round(sizes["narrow"] / 1e9, 3)],
        "peak_gb": [side["peak_gb"] for side in every],
        "step_s": [side["step_s"] for side in every],
        "sync_share": round(sizes["sent"] / sizes["bytes"], 4),
    }
    for name, value in result.items():
        names = ("LoRA", "QLoRA") if name == "frozen_gb" else ("all weights", "LoRA", "QLoRA")
        pairs = zip(value, names, strict=False) if isinstance(value, list) else ()
        print(f"{name}: {', '.join(f'{number} {side}' for number, side in pairs) or value}")
    if options.json:
        print(json.dumps(result))


def train(options: argparse.Namespace, side: dict[str, Any]) -> dict[str, float]:
    """One run's peak of memory, and the median of its steps without the first."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "rows.jsonl")
        rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
        texts = [json.dumps({"prompt": row["question"], "completion": row["answer"]}) for row in rows]
        data.write_text("\n".join(texts) + "\n")
        settings = {
            "algo": "sft",
            "actor.model": options.model,
            **side,
            "data": data,
            "train.batch-size": 8,
            "train.steps": options.steps,
            "kernels": "none",
            "checkpoint.every": 0,
            "checkpoint.final": "false",
        }
        steps = run_ours(flags(settings), Path(folder, "run"), options.threads)
    return {"peak_gb": steps[-1]["memory/rss_gb"], "step_s": statistics.median(row["time/step"] for row in steps[1:])}


def summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    return {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}


def bytes_of(options: argparse.Namespace) -> dict[str, int]:
    """How many weights there are, and how many are trained; the bytes of all, of all in 4 bits, and of what an engine
    gets of an adapter."""
    from rlhf_host.config.schema import LoraOptions, RoleConfig
    from rlhf_host.models.adapters import attach, engine_weights
    from rlhf_host.models.loading import load_model

    model = load_model(RoleConfig(model=str(options.model), dtype="float32"))
    weights = list(model.parameters())
    count, size = sum(each.numel() for each in weights), sum(each.numel() * each.element_size() for each in weights)
    attach(model, LoraOptions(rank=options.rank), str(options.model))
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    sent = sum(tensor.numel() * tensor.element_size() for _, tensor in engine_weights(model))
    model = load_model(RoleConfig(model=str(options.model), dtype="float32", quantize="4bit"))
    narrow = sum(each.numel() * each.element_size() for each in model.parameters())
    return {"weights": count, "trained": trained, "bytes": size, "sent": sent, "narrow": narrow}


if __name__ == "__main__":
    main()
