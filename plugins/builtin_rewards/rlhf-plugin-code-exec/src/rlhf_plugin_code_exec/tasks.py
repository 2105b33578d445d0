"""What a task's tests are, in the forms that data sets have, and what an answer's code is."""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import dedent
from types import BuiltinFunctionType
from typing import Any

from rlhf_host import Task

_FENCE = re.compile(  # possessive, so that an answer of 20,000 backticks takes no time
    r"^(?P<before>[^\n]*?)(?<![`~])(?P<fence>`{3,}+|~{3,}+)[ \t]*+(?P<tag>[\w+#.{}-]*+)[ \t]*+(?:[\w-]++=[^\n`]*+)?\n"
    r"(?P<code>.*?)(?:(?P=fence)|\Z)",
    re.S | re.M,
)
_PYTHON = re.compile(r"py(?:thon)?[\d.]*", re.I)
_MARGIN = re.compile(r"[ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?")
"""Of a fence: spaces, or the mark of a list."""
FORMS = "assert statements, {inputs, outputs}, or test and entry_point"


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
    """The last block that is fenced as Python, or the last without a language, or all of the answer."""
    answer = answer.replace("\r\n", "\n")
    python, plain = [], []
    for block in _FENCE.finditer(answer):
        if _PYTHON.fullmatch(block["tag"].strip("{.}")):
            python.append(block)
        elif not block["tag"]:
            plain.append(block)
    if not (blocks := python or plain):
        return answer
    margin = len(blocks[-1]["before"]) if _MARGIN.fullmatch(blocks[-1]["before"]) else 0
    return re.sub(rf"^[ \t]{{1,{margin}}}", "", blocks[-1]["code"], flags=re.M) if margin else blocks[-1]["code"]


def solution_of(answer: str, before: str) -> str:
    """The whole program: an answer that does not define what ``before`` begins continues it."""
    code = code_of(answer)
    whole = dedent(code) if code.lstrip("\n")[:1].isspace() else code
    if not before:
        return whole
    begun = re.findall(r"^def (\w+)", before, re.M)
    defined = rf"^(?:async )?def {begun[-1]}\b" if begun else r"(?!)"
    # A body may begin with a helper of the same name.
    if re.search(defined, code, re.M) or (re.search(defined, whole, re.M) and not re.search(r"^return\b", whole, re.M)):
        return f"{_imports(before)}\n{whole}"
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
        return _pairs(tests)
    if isinstance(tests, Sequence) and not isinstance(tests, str):
        tests = "\n".join(map(str, tests))
    if not isinstance(tests, str) or not tests.strip():
        raise ValueError(f"it has no tests: give {FORMS}")
    imports = told.get("test_imports") or []
    imports = [imports] if isinstance(imports, str) else list(map(str, imports))
    setup = "\n".join([*imports, str(told.get("test_setup_code") or told.get("setup") or "")])
    try:
        return _asserts(setup, tests)
    except SyntaxError as error:
        raise ValueError(f"its tests are no Python: {error}") from error


def _pairs(tests: Mapping[str, Any]) -> Calls | Programs:
    """Inputs and outputs, of programs or, with ``fn_name``, of a function. A text is one of them."""
    inputs, outputs = ([each] if isinstance(each, str) else each for each in (tests["inputs"], tests["outputs"]))
    if not (isinstance(inputs, list | tuple) and isinstance(outputs, list | tuple)):
        raise ValueError("its inputs and outputs are neither lists nor texts")
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"it has {len(inputs)} inputs and {len(outputs)} outputs")
    if not (name := tests.get("fn_name")):
        return Programs(list(map(_text, inputs)), list(map(_text, outputs)))
    if not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"its fn_name {name!r} is no name of a function")
    if not all(isinstance(arguments, list | tuple) for arguments in inputs):
        raise ValueError("with fn_name, each of its inputs is the list of the function's arguments")
    cases = json.dumps(list(zip(inputs, outputs, strict=True)))
    return Calls(f"{_SAME}\n_cases = json.loads({cases!r})\n", _EACH.format(name=name), [name])


# As in the evaluation of APPS: tuples are lists, and an output may be wrapped in a list of its own.
_SAME = """
import json
def _listed(value):
    return [_listed(each) for each in value] if isinstance(value, (list, tuple)) else value
def _same(value, wanted):
    value = _listed(value)
    return value == wanted or isinstance(wanted, list) and bool(wanted) and value == wanted[0]
"""
_EACH = """
for _arguments, _wanted in _cases:
    assert _same({name}(*_arguments), _wanted)
"""


def _asserts(setup: str, tests: str) -> Calls:
    """Raises ``ValueError`` where nothing of the solution is tested, ``SyntaxError`` for what is no Python."""
    tree = ast.parse(tests)
    own = _defined(setup) | _defined(tests)
    free = (_loaded(setup) | _loaded(tests)) - own
    names = free - set(dir(builtins))
    for name in sorted(names - _uses(f"{setup}\n{tests}")):  # of its attributes alone
        if name not in sys.stdlib_module_names:
            raise ValueError(f"its tests use attributes of {name}, and reach functions of the solution alone")
        setup = f"import {name}\n{setup}"
        names.remove(name)
    if not names and any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        # A solution may have the name of a built-in function, as ``sum`` in MBPP, where nothing else is called.
        builtin = [name for name in free if isinstance(getattr(builtins, name), BuiltinFunctionType)]
        names = set(builtin) if len(builtin) == 1 else set()
    unused = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test")]
    unused = [name for name in unused if name not in _loaded(tests)]
    tests = "\n".join([tests, *(f"{name}()" for name in unused)])
    if not names or not any(_tests(node, names | own) for node in ast.parse(tests).body):
        raise ValueError(f"its tests call nothing of the solution: give {FORMS}")
    return Calls(setup, tests, sorted(names))


def _tests(statement: ast.stmt, functions: set[str]) -> bool:
    """Whether it asserts something or calls one of the functions as the module runs."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return False
    return any(
        isinstance(node, ast.Assert)
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions)
        for node in ast.walk(statement)
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _loaded(code: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _uses(code: str) -> set[str]:
    """Names that stand for themselves somewhere, not for an attribute."""
    nodes = list(ast.walk(ast.parse(code)))
    of_attributes = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    return {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in of_attributes}


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
