"""A task's tests, in the forms of public data sets."""

from __future__ import annotations

import ast
import base64
import io
import json
import pickle
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_host import Task
from rlhf_plugin_code_exec.suites import FORMS, Suite, suite_of


@dataclass(frozen=True, slots=True)
class Cases:
    """Arguments of one function and its results."""

    function: str
    cases: Sequence[tuple[Sequence[Any] | Mapping[str, Any], Any]]
    wrapped: bool
    """True if each result is in a list of its own."""


@dataclass(frozen=True, slots=True)
class Programs:
    """Programs that read their standard input."""

    inputs: Sequence[str]
    outputs: Sequence[str]


Tests = Suite | Cases | Programs
COLUMNS = ("tests", "test_cases", "test_list", "test_code", "input_output", "verification_info", "official_tests", "test")
"""Columns with the tests of a row, if they are not in its label."""
SPLIT = (
    ("public_test_cases", "private_test_cases"),
    ("public_tests", "private_tests", "generated_tests"),
)
"""Columns that together have a row's tests: of LiveCodeBench, of CodeContests."""
NESTED = ("ground_truth", "verification_info", "reward_model", "test_cases", "tests", "input_output")
"""Keys under which an object of tests contains another."""
REPOSITORY = ("FAIL_TO_PASS", "test_patch")
INPUTS, OUTPUTS = ("inputs", "input", "stdin"), ("outputs", "output", "expected_output", "stdout")
CODE = ("test", "test_code", "functional")
FUNCTION = ("fn_name", "func_name", "function_name", "entry_point")
NODES = {"ListNode", "TreeNode", "Node", "list_node", "tree_node", "is_same_list", "is_same_tree"}
"""Names of LeetCode's header by which tests make arguments and compare results: a solution may not bring its own."""
OTHER_LANGUAGES = {
    "c",
    "c#",
    "c++",
    "cpp",
    "csharp",
    "go",
    "java",
    "javascript",
    "js",
    "julia",
    "kotlin",
    "lua",
    "php",
    "r",
    "ruby",
    "rust",
}
OTHER_LANGUAGES |= {"scala", "shell", "bash", "sql", "swift", "typescript", "ts", "haskell", "perl"}


def tests_of(task: Task) -> Tests:
    """Returns the tests. Raises ``ValueError`` for a task that has none."""
    row: dict[str, Any] = {**task.metadata}
    if any(row.get(column) for column in REPOSITORY):
        raise ValueError(
            "its tests change a repository, as in SWE-bench, and need its container: code_exec judges single programs"
        )
    if row.get("generated_checker"):
        raise ValueError(
            "several outputs are right, and a program of its own (generated_checker) decides: code_exec compares outputs"
        )
    _check_language(row)
    if isinstance(row.get("test"), str) and row.get("entry_point"):
        return _of_prompt(row, task.prompt)
    problems = []
    for told in _candidates(row, task.ground_truth):
        try:
            return _tests(told, row)
        except SyntaxError as error:
            problems.append(f"its tests are no Python: {error}")
        except ValueError as error:
            problems.append(str(error))
    raise ValueError(problems[0] if problems else f"it has no tests: give {FORMS}")


def _candidates(row: Mapping[str, Any], label: Any) -> Iterable[Any]:
    """Yields places where tests may be. A label that is a text may be a solution, so columns of tests come first."""
    label = _read(label)
    if label is not None and not isinstance(label, str):
        yield label
    inputs, outputs = _read(row.get("inputs")), _read(row.get("outputs"))
    if isinstance(inputs, list) and isinstance(outputs, list):
        yield {**row, "inputs": inputs, "outputs": outputs}
    for columns in SPLIT:
        if any(row.get(column) for column in columns):
            yield _joined({column: _part(row, column) for column in columns if column in row})
    for column in COLUMNS:
        if (told := _read(row.get(column))) not in (None, "", [], {}):
            yield told
    if isinstance(model := _read(row.get("reward_model")), Mapping):
        yield model
    if isinstance(label, str) and label.strip():
        yield label


def _tests(told: Any, row: Mapping[str, Any]) -> Tests:
    """Returns the tests. Raises ``ValueError``, ``SyntaxError``."""
    told = _read(told)
    if isinstance(told, Mapping):
        return _of_object(told, row)
    if isinstance(told, Sequence) and not isinstance(told, str):
        if told and all(isinstance(each, Mapping) for each in told):
            return _of_list(told, row)
        told = "\n".join(map(str, told))
    if not isinstance(told, str) or not told.strip():
        raise ValueError(f"it has no tests: give {FORMS}")
    imports = row.get("test_imports") or []
    imports = [imports] if isinstance(imports, str) else list(map(str, imports))
    setup = "\n".join([*imports, str(row.get("test_setup_code") or row.get("setup") or row.get("import_prefix") or "")])
    entry = str(row.get("entry_point") or "").rpartition(".")[2]
    header = str(row.get("import_prefix") or "")
    return _with_nodes(suite_of(setup, _with_check(told, entry), entry=entry, header=header), entry)


def _of_prompt(row: Mapping[str, Any], prompt: Any) -> Suite:
    """Handles HumanEval, whose prompt begins the function."""
    entry = str(row["entry_point"]).rpartition(".")[2]
    begins_it = re.compile(rf"^(async )?def {re.escape(entry)}\b", re.M)
    texts = [str(each) for each in (row.get("prompt_code"), prompt, row.get("prompt")) if isinstance(each, str)]
    begun = next((each for each in texts if begins_it.search(each) or _is_code(each)), "")
    begins = begins_it.search(begun) is not None
    setup = begun + "    pass\n" if begins else begun
    try:
        before, header = (begun, "") if begins else ("", setup)
        return _with_nodes(suite_of(setup, _with_check(row["test"], entry), before, entry, header), entry)
    except SyntaxError as error:
        raise ValueError(f"its tests are no Python: {error}") from error


def _with_nodes(suite: Suite, entry: str) -> Suite:
    """Returns the suite. Raises ``ValueError`` if it lacks LeetCode's header."""
    if entry and (absent := sorted(NODES & {*suite.names} - {entry})):
        raise ValueError(
            f"its tests use {', '.join(absent)} of LeetCode's header, which it does not have: give it as prompt_code"
        )
    return suite


def _is_code(text: str) -> bool:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return any(isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef) for node in tree.body)


def _with_check(tests: str, entry: str) -> str:
    """Handles HumanEval's ``check``, which takes the function that it tests."""
    return f"{tests}\ncheck({entry})\n" if entry and re.search(r"^def check\(", tests, re.M) else tests


def _of_object(told: Mapping[str, Any], row: Mapping[str, Any]) -> Tests:
    _check_language(told)
    if (inputs := _first(told, INPUTS)) is not None and (outputs := _first(told, OUTPUTS)) is not None:
        return _pairs(inputs, outputs, _function(told, row))
    if isinstance(code := _first(told, CODE), str):
        return _tests(code, {**row, **told})
    for key in NESTED:
        if (inner := _read(told.get(key))) not in (None, "", [], {}):
            return _tests(inner, {**row, **{name: each for name, each in told.items() if name != key}})
    raise ValueError(f"its tests are an object with {', '.join(map(str, told)) or 'nothing'}: give {FORMS}")


def _of_list(told: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> Tests:
    """Handles a list with one object for each test."""
    kinds = {"functional" if _is_call(each, row) else "stdin" for each in told}
    if len(kinds) > 1:
        raise ValueError("some of its tests call a function, and others run a program")
    inputs, outputs = [_first(each, INPUTS) for each in told], [_first(each, OUTPUTS) for each in told]
    if any(each is None for each in outputs) or any(each is None for each in inputs):
        raise ValueError(f"its tests are objects with {', '.join(map(str, told[0]))}: give input and output")
    name = _function(told[0], row) if kinds == {"functional"} else None
    if kinds == {"functional"} and name is None:
        raise ValueError("its tests call a function and do not name it: give fn_name")
    if name is not None and all(isinstance(each, str) for each in inputs):  # LiveCodeBench: JSON, an argument on each line
        inputs = [[_value(line) for line in each.split("\n") if line.strip()] for each in inputs]
        outputs = [_value(each) for each in outputs]
    return _pairs(inputs, outputs, name)


def _is_call(test: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Returns True if it calls a function: it says so, or it gives arguments to a function that the task names."""
    if kind := str(test.get("type") or test.get("testtype") or ""):
        return kind.startswith(("func", "call"))
    return bool(test.get("fn_name")) or (not isinstance(_first(test, INPUTS), str) and _function(test, row) is not None)


def _function(told: Mapping[str, Any], row: Mapping[str, Any]) -> str | None:
    """Returns the function that tests call, if it is a single one."""
    about = _read(row.get("metadata"))
    for each in (told, _read(told.get("metadata")), row, about):
        if isinstance(each, Mapping) and (name := _first(each, FUNCTION)):
            name = str(name).rpartition(".")[2]
            if not name.isidentifier():
                raise ValueError(f"its fn_name {name!r} is no name of a function")
            return name
    return None


def _pairs(inputs: Any, outputs: Any, name: str | None) -> Cases | Programs:
    """Returns inputs and outputs, of programs or of a function. A text is one of them."""
    inputs, outputs = ([each] if isinstance(each, str) else each for each in (inputs, outputs))
    if not (isinstance(inputs, list | tuple) and isinstance(outputs, list | tuple)):
        raise ValueError("its inputs and outputs are neither lists nor texts")
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"it has {len(inputs)} inputs and {len(outputs)} outputs")
    if name is None:
        return Programs(list(map(_text, inputs)), list(map(_text, outputs)))
    if not all(isinstance(arguments, list | tuple | Mapping) for arguments in inputs):
        raise ValueError("with fn_name, each of its inputs is the list of the function's arguments, or an object of them")
    json.dumps([inputs, outputs])
    return Cases(
        name, list(zip(inputs, outputs, strict=True)), all(isinstance(each, list) and len(each) == 1 for each in outputs)
    )


def _part(row: Mapping[str, Any], column: str) -> Any:
    """Returns the tests of a column. Raises ``ValueError`` if they cannot be read: the others alone are fewer than its tests."""
    part = _read(row[column])
    if part is None and column == "private_test_cases":
        raise ValueError(f"its {column} are missing")
    if part is None:  # of CodeContests, which has no private tests for some
        part = []
    if isinstance(part, str):
        raise ValueError(f"its {column} cannot be read: {part[:40]!r}{'...' * (len(part) > 40)}")
    if isinstance(part, Mapping):
        given = [_first(part, names) for names in (INPUTS, OUTPUTS)]
        usable = all(isinstance(each, list | tuple) for each in given) and len(given[0]) == len(given[1])
    else:
        usable = isinstance(part, list | tuple) and all(isinstance(each, Mapping) for each in part)
    if not usable:
        raise ValueError(f"its {column} are {type(part).__name__}, and not tests with inputs and outputs")
    return part


def _joined(parts: Mapping[str, Any]) -> Any:
    """Returns public, private and generated tests as one. Raises ``ValueError``."""
    kinds = {isinstance(part, Mapping) for part in parts.values() if part}
    if len(kinds) > 1:
        raise ValueError(f"its {' and '.join(parts)} are lists and objects of tests: give one of these")
    if kinds == {True}:
        both = [[each for part in parts.values() if part for each in _first(part, names)] for names in (INPUTS, OUTPUTS)]
        return {"inputs": both[0], "outputs": both[1]}
    return [each for part in parts.values() for each in part]


def _read(told: Any) -> Any:
    """Returns the value of a text that is JSON, Python's notation of it, or LiveCodeBench's packed JSON."""
    if isinstance(told, bytes):
        told = told.decode("utf-8", "replace")
    if isinstance(told, str) and told[:1] in ("{", "[", " ", "\n", "\t"):
        for reader in (json.loads, ast.literal_eval):
            try:
                value = reader(told)
            except (ValueError, SyntaxError):
                continue
            return value if isinstance(value, list | dict) else told
    if isinstance(told, str) and told.startswith(("eJ", "eN", "eA", "eF")):
        return _unpacked(told)
    return told


def _value(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text


def _unpacked(text: str) -> Any:
    """Unpacks base64 of zlib of a pickled text, or of the text itself. Nothing but a text is read from the pickle."""
    try:
        plain = zlib.decompress(base64.b64decode(text.encode()))
        packed = plain.decode() if plain[:1] in (b"[", b"{") else _Texts(io.BytesIO(plain)).load()
        value = json.loads(packed)
    except Exception:  # a pickle may raise any
        return text
    return value


class _Texts(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


def _first(told: Mapping[str, Any], keys: Iterable[str]) -> Any:
    return next((told[key] for key in keys if told.get(key) is not None), None)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _check_language(told: Mapping[str, Any]) -> None:
    language = told.get("language") or told.get("lang")
    if isinstance(language, str) and language.strip().lower() in OTHER_LANGUAGES:
        raise ValueError(f"its language is {language}, and code_exec judges Python")
