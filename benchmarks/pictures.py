"""Memory and disk that prompts with pictures take to read, in bytes per byte of the pictures' files.

    python benchmarks/pictures.py [--rows 10000] [--json]

Draws ``--rows`` JPEGs of 320×240 pixels of noise, and reads them as prompts in two forms: a JSONL file with paths, and one Parquet
file with the same bytes, as ``datasets`` writes them. Each is read in a process of its own, with the tokenizer and the processor
of the tiny model of ``rlhf-plugin-shapes``. Memory is what the process has beyond what it had before it read: at most (``peak``),
and after it, with 64 pictures loaded (``after``). ``cache`` is what it wrote. With ``--json`` the last line is one object.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
from PIL import Image
from rlhf_plugin_shapes.model import make_model

from rlhf_host.config.schema import DataConfig, RoleConfig
from rlhf_host.data.sources import load_tasks
from rlhf_host.models.loading import load_tokenizer

SIZE = 320, 240
PROMPT = "<image>How many dots?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--read", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        print(json.dumps(read(*options.read)))
        return
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model, results = make_model(root / "model"), dict[str, Any](rows=options.rows)
        size = results["files_mb"] = write(root, options.rows) / 1e6
        print(f"{options.rows:,} pictures, {size:.0f} MB")
        for name in ("paths.jsonl", "bytes.parquet"):
            cache = root / f"cache-{name}"
            said = in_a_process(model, root / name, cache)
            said["cache"] = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
            times = {key: round(said[key] / 1e6 / size, 3) for key in ("peak", "after", "cache")}
            results[name] = {**times, "seconds": round(said["seconds"], 1)}
            print(f"{name}: {times['peak']:.2f} times the files' bytes at most, {times['after']:.2f} after it;", end=" ")
            print(f"{times['cache']:.2f} in the cache; {said['tasks']:,} tasks in {said['seconds']:.1f} s", flush=True)
    if options.json:
        print(json.dumps(results))


def write(root: Path, count: int) -> int:
    """Writes the pictures, the JSONL file and the Parquet file. Returns the bytes of the pictures' files."""
    import datasets

    (root / "pictures").mkdir()
    rng, total = numpy.random.default_rng(0), 0
    with (root / "paths.jsonl").open("w", encoding="utf-8") as lines:
        for number in range(count):
            file = io.BytesIO()
            Image.fromarray(rng.integers(256, size=(*SIZE[::-1], 3), dtype=numpy.uint8)).save(file, "JPEG", quality=85)
            (root / f"pictures/{number}.jpg").write_bytes(file.getvalue())
            total += len(file.getvalue())
            lines.write(json.dumps({"prompt": PROMPT, "image": f"pictures/{number}.jpg", "label": str(number)}) + "\n")

    def rows() -> Iterator[dict[str, Any]]:
        for number in range(count):
            yield {
                "prompt": PROMPT,
                "image": {"bytes": (root / f"pictures/{number}.jpg").read_bytes(), "path": None},
                "label": str(number),
            }

    features = datasets.Features(prompt=datasets.Value("string"), image=datasets.Image(), label=datasets.Value("string"))
    dataset = datasets.Dataset.from_generator(rows, features=features, cache_dir=str(root / "datasets"))
    dataset.to_parquet(root / "bytes.parquet")
    return total


def in_a_process(model: Path, data: Path, cache: Path) -> dict[str, float]:
    environment = {**os.environ, "RLHF_CACHE": str(cache), "HF_HOME": str(cache / "hf"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--read", str(model), str(data)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit("reading failed")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def read(model: Path, data: Path) -> dict[str, float]:
    """Does what a start does with its prompts and its first pictures. Returns seconds, tasks and memory."""
    tokenizer = load_tokenizer(RoleConfig(model=str(model)))
    before, begun = memory("VmRSS"), time.perf_counter()
    tasks = load_tasks(DataConfig(sources=[{"path": str(data)}]), split="train", tokenizer=tokenizer, seed=0)
    read_tasks = tasks.tasks
    seconds = time.perf_counter() - begun
    for picture in (picture for task in read_tasks[:64] for picture in task.images):
        picture.load()
    return {
        "seconds": seconds,
        "tasks": len(read_tasks),
        "peak": memory("VmHWM") - before,
        "after": memory("VmRSS") - before,
    }


def memory(field: str) -> int:
    """Returns bytes of this process's memory: ``VmRSS`` now, ``VmHWM`` at most."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


if __name__ == "__main__":
    main()
