"""Lines of the host by folder: all, those of code, and how many of them an ordinary run loads and executes.

    python benchmarks/host_size.py

Lines are all lines of Python files, ``code`` those without docstrings, comments and empty ones. Loaded are the modules in the
process of ``rlhf train --algo rloo --reward math_verifier`` when it ends, after three steps on a tiny model without Ray. ``in
functions`` are lines of code in the bodies of functions, and ``run`` those of them that this process executed; of a statement
over several lines, the lines at which Python evaluates something. The core is everything but ``distributed``. Below the table
are files over 400 lines, and functions over 60, counted from ``def`` to the last line with docstrings and nested functions.
"""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rlhf_authoring.models import write_tiny_model

import rlhf_host

HOST = Path(rlhf_host.__file__).parent
DISTRIBUTED = "distributed"

LONG_FILE, LONG_FUNCTION = 400, 60

PROGRAM = """
import json, sys, threading
output, host, *arguments = sys.argv[1:]
ran = {}

def on_call(frame, event, argument):
    file = frame.f_code.co_filename
    if not file.startswith(host):
        return None
    lines = ran.setdefault(file, set())

    def on_line(frame, event, argument):
        if event == "line":
            lines.add(frame.f_lineno)
        return on_line

    return on_line

threading.settrace(on_call)
sys.settrace(on_call)
from rlhf_host.cli.main import main
try:
    main(arguments)
finally:
    sys.settrace(None)
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    with open(output, "w") as out:
        json.dump({file: sorted(ran.get(file, ())) for file in files if file}, out)
"""
"""The command, and the files that it loaded, each with the lines that it executed."""

BETWEEN = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
"""Tokens that are no code."""


@dataclass(frozen=True, slots=True)
class File:
    """One file of the host, and what a run had of it."""

    path: str
    text: str
    loaded: bool
    code: frozenset[int]
    """Lines of code."""
    in_functions: frozenset[int]
    """Those in the bodies of functions."""
    run: frozenset[int]
    """Those of them that were executed."""

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def folder(self) -> str:
        """The folder, with that in it below ``distributed``."""
        folder, _, rest = self.path.rpartition("/")[0].partition("/")
        return f"{folder}/{rest or '(top)'}" if folder == DISTRIBUTED else folder or "(top)"


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="host-size-") as folder:
        ran = run_of(Path(folder))
    files = [read(path, ran.get(path.relative_to(HOST).as_posix())) for path in sorted(HOST.rglob("*.py"))]
    far = [file for file in files if file.folder.startswith(DISTRIBUTED)]
    core = [file for file in files if not file.folder.startswith(DISTRIBUTED)]

    print(f"{'folder':<22} {'lines':>6} {'code':>6} {'loaded':>14} {'in functions':>13} {'run':>13}")
    for half, name in ((core, "core"), (far, DISTRIBUTED)):
        for room in sorted({file.folder for file in half}):
            print(row(room, [file for file in half if file.folder == room]))
        print(row(name, half) + "\n")
    print(row("all", files))

    long_files = [(file.lines, file.path) for file in files if file.lines > LONG_FILE]
    print(f"\n{len(long_files)} files over {LONG_FILE} lines, of {len(files)}")
    for size, path in sorted(long_files, reverse=True):
        print(f"{size:>6} {path}")
    found = [function for file in files for function in functions(file.path, file.text)]
    long_functions = [function for function in found if function[0] > LONG_FUNCTION]
    print(f"\n{len(long_functions)} functions over {LONG_FUNCTION} lines, of {len(found)}")
    for size, path, name in sorted(long_functions, reverse=True):
        print(f"{size:>6} {path} {name}")


def run_of(folder: Path) -> dict[str, list[int]]:
    """Paths below the host of the modules that a run loads, each with the lines that it executes; the run is made in ``folder``."""
    write_tiny_model(folder / "model")
    flags = ["train", "--algo", "rloo", "--reward", "math_verifier", "--data", "arithmetic", "--actor.model", "model"]
    flags += ["--rollout.n", "4", "--rollout.max-new-tokens", "8", "--train.batch-size", "4", "--train.steps", "3"]
    command = [sys.executable, "-c", PROGRAM, "ran.json", f"{HOST}{os.sep}", *flags, "--run-dir", "run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"rlhf train failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    files = {Path(file): lines for file, lines in json.loads((folder / "ran.json").read_text()).items()}
    return {file.relative_to(HOST).as_posix(): lines for file, lines in files.items() if file.is_relative_to(HOST)}


def read(path: Path, run: list[int] | None) -> File:
    """Returns a file of the host; ``run`` are the lines that were executed, None for a file that was not loaded."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    code = frozenset(code_lines(text, tree))
    inside = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside |= set(range(node.body[0].lineno, (node.end_lineno or 0) + 1))
    in_functions = code & inside
    name = path.relative_to(HOST).as_posix()
    return File(name, text, run is not None, code, in_functions, in_functions & frozenset(run or ()))


def code_lines(text: str, tree: ast.Module) -> set[int]:
    """Returns the numbers of the lines that are no docstring, comment or empty line."""
    lines, rows = set[int](), text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in BETWEEN:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return {line for line in lines if rows[line - 1].strip()}


def row(name: str, files: Iterable[File]) -> str:
    files = list(files)
    lines, code = sum(file.lines for file in files), sum(len(file.code) for file in files)
    loaded = sum(file.lines for file in files if file.loaded)
    inside, run = sum(len(file.in_functions) for file in files), sum(len(file.run) for file in files)
    shares = [f"{part:>6} {part / max(whole, 1):>6.0%}" for part, whole in ((loaded, lines), (run, inside))]
    return f"{name:<22} {lines:>6} {code:>6} {shares[0]:>14} {inside:>13} {shares[1]:>13}"


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
