"""Seconds and memory that a data set of many pairs takes to load: tokenised at the first start, read again at the second.

    python benchmarks/million_rows.py [--data pairs.jsonl] [--rows 1000000] [--model DIR] [--json]

Makes ``--rows`` different pairs of those given (``--data``, JSON lines in a format that ``rlhf train --algo dpo`` reads; default:
GSM8K's questions with their own answers and others') by putting a number before each prompt. Each start is a process of its own,
with the tokenizer of ``--model`` (default: ``models/SmolLM2-135M-Instruct``), and also draws 1,000 shuffled units. Memory is the
largest resident set of any process of a start, with the libraries that a run imports.
With ``--json`` the last line is one object: ``first_s``, ``first_processor_s`` (of all processors), ``first_gb``, the same for
``second``, ``disk_gb`` and ``rows``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path

from both_sides import ROOT
from offline_vs_trl import write_pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="JSON lines")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--model", type=Path, default=ROOT / "models/SmolLM2-135M-Instruct")
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        start(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "pairs.jsonl")
        write_many(options.data or write_pairs(Path(folder, "given.jsonl")), data, options.rows)
        results: dict[str, float] = {"rows": options.rows}
        for name in ("first", "second"):
            said = in_a_process(options, data, Path(folder, "cache"))
            seconds = f"{said['seconds']:.1f} s ({said['processor_s']:.1f} s of processors)"
            print(f"{name} start: {seconds}, {said['gb']:.2f} GB, {said['units']:,} pairs; {said['report']}", flush=True)
            print(f"  1,000 shuffled units after it: {said['draw_s']:.2f} s", flush=True)
            results |= {
                f"{name}_s": round(said["seconds"], 2),
                f"{name}_processor_s": round(said["processor_s"], 2),
                f"{name}_gb": round(said["gb"], 3),
            }
        kept = sum(path.stat().st_size for path in Path(folder, "cache").rglob("*") if path.is_file())
        results["disk_gb"] = round(kept / 1e9, 3)
    if options.json:
        print(json.dumps(results))


def write_many(given: Path, data: Path, count: int) -> None:
    """Pairs in turn, each with its number in it."""
    rows = [json.loads(line) for line in given.read_text(encoding="utf-8").splitlines()]
    with data.open("w", encoding="utf-8") as file:
        for number, row in enumerate(islice(cycle(rows), count)):
            file.write(json.dumps({key: numbered(key, value, number) for key, value in row.items()}) + "\n")


def numbered(key: str, value: str, number: int) -> str:
    if value.startswith("\n\nHuman:"):
        return f"\n\nHuman: ({number}){value.removeprefix(chr(10) * 2 + 'Human:')}"
    return f"({number}) {value}" if key == "prompt" else value


def in_a_process(options: argparse.Namespace, data: Path, cache: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--start", str(data), "--model", str(options.model)]
    environment = {**os.environ, "RLHF_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    arguments = ["--max-tokens", str(options.max_tokens)]
    done = subprocess.run([*command, *arguments], env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit("loading failed")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def start(options: argparse.Namespace) -> None:
    """What a start does with its data."""
    from rlhf_rows.load_units import load_units

    import rlhf_host.training.run  # noqa: F401
    from rlhf_host.config.schema import DataConfig, RoleConfig
    from rlhf_host.data.stream import TaskStream
    from rlhf_host.models.loading import load_tokenizer

    tokenizer = load_tokenizer(RoleConfig(model=str(options.model)))
    data = DataConfig(sources=[{"path": str(options.start)}], max_tokens=options.max_tokens, on_bad_row="skip")
    begun, processor = time.perf_counter(), time.process_time()
    units = load_units(data, kind="preference", split="train", tokenizer=tokenizer)
    stream = TaskStream(units.tasks(), 0)
    loaded, spent = time.perf_counter(), time.process_time() - processor
    tokens = 0
    for draw in stream.draw(1000, 1):
        tokens += sum(len(row.completion_ids) for row in units.sources[draw.task.source][draw.task.index].rows)
    drawn = time.perf_counter() - loaded
    most = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    said = {
        "seconds": loaded - begun,
        "processor_s": spent,
        "gb": most * 1024 / 1e9,
        "units": len(units),
        "draw_s": drawn,
        "tokens": tokens,
    }
    print(json.dumps({**said, "report": units.report[0]}))


if __name__ == "__main__":
    main()
