"""Lines of the host by folder, and how many of them an ordinary run loads.

    python benchmarks/host_size.py

Lines are all lines of Python files: code, docstrings, comments, empty ones. Loaded are the modules in the process of ``rlhf train
--algo rloo --reward math_verifier`` when it ends, after one step on a tiny model without Ray. The last row of the table leaves out
the modules for Ray, DeepSpeed, vLLM and weight sync: those that match ``DISTRIBUTED`` and not ``ONE_PROCESS``. Below the table are
files over 400 lines, and functions over 60, counted from ``def`` to the last line with docstrings and nested functions.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

from rlhf_authoring.models import write_tiny_model

import rlhf_host

HOST = Path(rlhf_host.__file__).parent

DISTRIBUTED = ("weight_sync/*", "runtimes/*", "engines/vllm*", "backends/deepspeed*")
ONE_PROCESS = ("runtimes/__init__.py", "runtimes/local*", "runtimes/building.py", "runtimes/compute.py")
"""Exceptions from ``DISTRIBUTED``: the runtime ``local``, and what it shares with Ray's."""

LONG_FILE, LONG_FUNCTION = 400, 60

PROGRAM = """
import json, sys
from rlhf_host.cli.main import main
try:
    main(sys.argv[2:])
finally:
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    with open(sys.argv[1], "w") as out:
        json.dump([file for file in files if file], out)
"""
"""The command, and a list of the files that it loaded."""


def main() -> None:
    lines = {path.relative_to(HOST).as_posix(): path.read_text().splitlines() for path in sorted(HOST.rglob("*.py"))}
    sizes = {path: len(text) for path, text in lines.items()}
    with tempfile.TemporaryDirectory(prefix="host-size-") as folder:
        loaded = loaded_files(Path(folder)) & sizes.keys()

    print(f"{'folder':<14} {'lines':>6} {'loaded':>7} {'share':>6}")
    for folder in sorted({folder_of(path) for path in sizes}):
        print(row(folder, [path for path in sizes if folder_of(path) == folder], sizes, loaded))
    print(row("all", sizes, sizes, loaded))
    print(row("one process", [path for path in sizes if not distributed(path)], sizes, loaded))
    print("one process: without the modules for Ray, DeepSpeed, vLLM and weight sync")

    long_files = [(size, path) for path, size in sizes.items() if size > LONG_FILE]
    print(f"\n{len(long_files)} files over {LONG_FILE} lines, of {len(sizes)}")
    for size, path in sorted(long_files, reverse=True):
        print(f"{size:>6} {path}")
    found = [function for path, text in lines.items() for function in functions(path, "\n".join(text))]
    long_functions = [function for function in found if function[0] > LONG_FUNCTION]
    print(f"\n{len(long_functions)} functions over {LONG_FUNCTION} lines, of {len(found)}")
    for size, path, name in sorted(long_functions, reverse=True):
        print(f"{size:>6} {path} {name}")


def loaded_files(folder: Path) -> set[str]:
    """Paths below the host of the modules that a run loads; the run is made in ``folder``."""
    write_tiny_model(folder / "model")
    flags = ["train", "--algo", "rloo", "--reward", "math_verifier", "--data", "arithmetic", "--actor.model", "model"]
    flags += ["--rollout.n", "4", "--rollout.max-new-tokens", "8", "--train.batch-size", "4", "--train.steps", "1"]
    command = [sys.executable, "-c", PROGRAM, "loaded.json", *flags, "--run-dir", "run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"rlhf train failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    files = map(Path, json.loads((folder / "loaded.json").read_text()))
    return {file.relative_to(HOST).as_posix() for file in files if file.is_relative_to(HOST)}


def row(name: str, paths: Iterable[str], sizes: dict[str, int], loaded: set[str]) -> str:
    paths = list(paths)
    lines, read = sum(sizes[path] for path in paths), sum(sizes[path] for path in paths if path in loaded)
    return f"{name:<14} {lines:>6} {read:>7} {read / max(lines, 1):>6.0%}"


def folder_of(path: str) -> str:
    return path.split("/")[0] if "/" in path else "(top)"


def distributed(path: str) -> bool:
    return any(fnmatch(path, pattern) for pattern in DISTRIBUTED) and not any(fnmatch(path, kept) for kept in ONE_PROCESS)


def functions(path: str, text: str) -> Iterator[tuple[int, str, str]]:
    """Lines, path and qualified name of every function."""

    def below(node: ast.AST, prefix: str) -> Iterator[tuple[int, str, str]]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from below(child, prefix)
                continue
            if not isinstance(child, ast.ClassDef):
                yield (child.end_lineno or child.lineno) - child.lineno + 1, path, f"{prefix}{child.name}"
            yield from below(child, f"{prefix}{child.name}.")

    yield from below(ast.parse(text), "")


if __name__ == "__main__":
    main()
