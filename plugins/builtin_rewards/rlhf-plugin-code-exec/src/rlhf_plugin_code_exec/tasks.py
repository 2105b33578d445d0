"""What a task's tests are, in the forms that data sets have, and what an answer's code is."""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_host import Task

_FENCE = re.compile(r"```(?:python|py|Python)?[ \t]*\n(.*?)(?:```|\Z)", re.S)


@dataclass(frozen=True, slots=True)
class Calls:
    """Tests that call functions of the solution."""

    setup: str
    """Code of the task's own that tests use: helpers, imports."""
    tests: str
    names: Sequence[str]
    """The functions that they call."""
    before: str = ""
    """Code that goes before an answer which continues it, as in HumanEval."""


@dataclass(frozen=True, slots=True)
class Programs:
    """Programs that read their standard input."""

    inputs: Sequence[str]
    outputs: Sequence[str]


def code_of(answer: str) -> str:
    """The last fenced block, or all of it."""
    blocks = _FENCE.findall(answer)
    return blocks[-1] if blocks else answer


def solution_of(answer: str, before: str) -> str:
    """The whole program: an answer that does not define what ``before`` begins continues it."""
    code = code_of(answer)
    if not before:
        return code
    begun = re.findall(r"^def (\w+)", before, re.M)
    if begun and re.search(rf"^(?:async )?def {begun[-1]}\b", code, re.M):
        return f"{_imports(before)}\n{code}"
    return before + code


def _imports(code: str) -> str:
    """What comes before the last function: imports and helpers."""
    return code[: [match.start() for match in re.finditer(r"^def ", code, re.M)][-1]]


def tests_of(task: Task) -> Calls | Programs:
    """Raises ``ValueError`` for a task that has none."""
    told: Mapping[str, Any] = {**task.metadata, "label": task.ground_truth}
    if "test" in told and "entry_point" in told:  # HumanEval
        before, entry = (
            str(told.get("prompt_code") or (task.prompt if isinstance(task.prompt, str) else "")),
            str(told["entry_point"]),
        )
        return Calls(before + "    pass\n" if before else "", f"{told['test']}\ncheck({entry})\n", [entry], before)
    label = told["label"]
    if isinstance(label, str) and label.lstrip().startswith("{"):
        with contextlib.suppress(ValueError):
            label = json.loads(label)
    tests = label if label is not None else told.get("tests", told.get("test_list", told.get("input_output")))
    if isinstance(tests, str) and tests.lstrip().startswith("{"):
        tests = json.loads(tests)
    if isinstance(tests, Mapping) and "inputs" in tests and "outputs" in tests:
        if len(tests["inputs"]) != len(tests["outputs"]) or not tests["inputs"]:
            raise ValueError(f"it has {len(tests['inputs'])} inputs and {len(tests['outputs'])} outputs")
        return Programs(list(map(_text, tests["inputs"])), list(map(_text, tests["outputs"])))
    if isinstance(tests, Sequence) and not isinstance(tests, str):
        tests = "\n".join(map(str, tests))
    if not isinstance(tests, str) or not tests.strip():
        raise ValueError("it has no tests: give assert statements, {inputs, outputs}, or test and entry_point")
    setup = str(told.get("test_setup_code") or told.get("setup") or "")
    try:
        return Calls(setup, tests, sorted(_called(tests) - _defined(setup)))
    except SyntaxError as error:
        raise ValueError(f"its tests are no Python: {error}") from error


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _called(code: str) -> set[str]:
    tree = ast.parse(code)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return names - _defined(code) - set(dir(builtins))


def _defined(code: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    return names


def same_output(said: str, wanted: str) -> bool:
    """Line by line without trailing space; numbers within 1e-6."""
    mine, theirs = [[line.split() for line in text.strip().splitlines()] for text in (said, wanted)]
    if mine == theirs:
        return True
    if [len(line) for line in mine] != [len(line) for line in theirs]:
        return False
    return all(
        a == b or _close(a, b) for line, other in zip(mine, theirs, strict=True) for a, b in zip(line, other, strict=True)
    )


def _close(a: str, b: str) -> bool:
    if not ("." in b or "e" in b.lower()):
        return False
    try:
        return abs(float(a) - float(b)) <= 1e-6 * max(1.0, abs(float(b)))
    except ValueError:
        return False
