"""Tests that are code: the names of the solution that they use, and their needs."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import BuiltinFunctionType

from rlhf_plugin_code_exec.contained.prelude import ALIASES, FROM
from rlhf_plugin_code_exec.isolation import isolated

FORMS = "assert statements, a file of pytest or unittest, {inputs, outputs}, or test and entry_point"
USUAL = {*FROM["typing"].split(), "ChainMap", "Counter", "Decimal", "Fraction", "OrderedDict", "StringIO", "deepcopy"}
USUAL |= {"defaultdict", "deque", "inf", "isclose", "isnan", "isinf", "lru_cache", "namedtuple", "nan", "pi"}
"""Names that tests use without importing them. Shorter than what solutions have: ``mean`` and ``gcd`` are tested, not used."""
_REPLACING = {"patch", "mock", "Mock", "MagicMock", "monkeypatch", "mocker"}
"""Names by which tests replace parts of their own process, which the solution is not in."""
_RUNNING = {"eval", "exec", "compile", "pickle", "marshal", "dill", "cloudpickle", "shelve", "runpy", "importlib", "subprocess"}
_RUNNING |= {"doctest"}
"""Names by which tests could run results of the solution as their own code."""


_FILES = {"open", "tmp_path", "tempfile", "pathlib", "os", "shutil", "csv", "sqlite3", "zipfile"}
"""Names by which tests make files or look at them."""


@dataclass(frozen=True, slots=True)
class Suite:
    """Code whose assertions are the tests."""

    setup: str
    """Code of the task's own that tests use: helpers, imports."""
    tests: str
    names: Sequence[str]
    """Names of the solution that they use."""
    before: str = ""
    """Code that goes before an answer which continues it, as in HumanEval."""
    usual: Sequence[str] = ()
    """Usual names, which these tests do not import."""
    modules: Sequence[str] = ()
    """Modules that they import and that do not come with Python."""
    collect: bool = False
    """True if there are test functions or classes that nothing calls."""
    called: Sequence[str] = ()
    """Test functions that they call themselves."""
    files: bool = False
    """True if they may exchange files with the solution."""
    header: str = ""
    """Code of the task's own that solutions use."""
    records: Sequence[str] = ()
    """Names of its classes, whose instances are passed as values."""
    plain: bool = False
    """True if they only pass plain values, so that whether they can be used needs no rehearsal."""


@lru_cache(maxsize=1024)
def suite_of(setup: str, tests: str, before: str = "", entry: str = "", header: str = "") -> Suite:
    """Returns the suite. Raises ``ValueError`` if nothing of the solution is tested, ``SyntaxError`` for code that is not
    Python.

    Args:
        entry: the tested function, if the task names it.
        header: code that is given to tests and to solutions, if it has classes, as ``ListNode`` of LeetCode.
    """
    tree = _as_one_module(ast.parse(tests))
    tests, both = ast.unparse(tree), [ast.parse(setup), tree]
    own = _defined(both) - {entry}
    free = _loaded(both) - own
    if refused := sorted(_REPLACING & (own | free)):
        raise ValueError(f"its tests replace parts of their process ({', '.join(refused)}), and the solution is in another one")
    if refused := sorted(_RUNNING & (free | {*_imported(both)})):
        raise ValueError(f"its tests could run what the solution gives ({', '.join(refused)})")
    modules = sorted({*_imported(both)} - sys.stdlib_module_names)
    names = free - set(dir(builtins))
    for name in sorted((names - _uses(both)) & sys.stdlib_module_names):  # of its attributes alone
        setup = f"import {name}\n{setup}"
        names.remove(name)
    aliases = {name for name in names & set(ALIASES) if name not in _uses(both)}
    modules += sorted({ALIASES[name] for name in aliases} - {*modules})
    names, usual = _parted(names - aliases, entry, "solution" in modules)
    asserts = any(isinstance(node, ast.Assert) for node in ast.walk(tree))
    if not names and asserts and not modules:
        # A solution may have the name of a built-in function, as ``sum`` in MBPP, where nothing else is called.
        builtin = [name for name in free if isinstance(getattr(builtins, name), BuiltinFunctionType)]
        names = set(builtin) if len(builtin) == 1 else set()
    records = [node.name for node in ast.parse(header).body if isinstance(node, ast.ClassDef) and not node.bases]
    waiting, called = _test_functions(tree)
    _check(tree, names, own, modules, bool(waiting))
    return Suite(
        isolated(setup, names),
        isolated(tests, names),
        sorted(names),
        before,
        sorted(usual | aliases),
        modules,
        bool(waiting),
        called,
        bool(_FILES & (own | free | {*_imported(both)})),
        header if records else "",
        records,
        _is_plain(both, names),
    )


_PLAIN = {
    "abs",
    "all",
    "any",
    "bool",
    "dict",
    "enumerate",
    "float",
    "frozenset",
    "int",
    "isinstance",
    "len",
    "list",
    "max",
    "min",
}
_PLAIN |= {"range", "repr", "reversed", "round", "set", "sorted", "str", "sum", "tuple", "type", "zip"}


def _is_plain(trees: Sequence[ast.Module], names: set[str]) -> bool:
    """Returns True for assertions at the top, with plain values and calls of the solution alone: nothing else can fail in them."""
    setup, tests = trees
    if setup.body or not all(isinstance(statement, ast.Assert | ast.Expr) for statement in tests.body):
        return False
    nodes = list(ast.walk(tests))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    return used <= names | _PLAIN and not any(isinstance(node, ast.Attribute | ast.Subscript | ast.Lambda) for node in nodes)


def _check(tree: ast.Module, names: set[str], own: set[str], modules: Sequence[str], waiting: bool) -> None:
    """Raises ``ValueError`` if no test calls the solution."""
    if not any(isinstance(node, ast.Assert | ast.Call) for node in ast.walk(tree)):
        raise ValueError(f"its tests are neither assertions nor calls: give {FORMS}")
    if not names and not set(modules) - {"pytest"}:
        raise ValueError(f"its tests use no function that they do not define themselves: give {FORMS}")
    if not waiting and not any(_runs(node, names | own) for node in tree.body):
        raise ValueError("its tests define functions and call none of them")


def _parted(names: set[str], entry: str, imports: bool) -> tuple[set[str], set[str]]:
    """Returns names of the solution, and usual ones, which are the solution's if there are no others."""
    usual = (names & USUAL) - {entry}
    return (names - usual, usual) if imports or names - usual else (names, set())


def _as_one_module(tree: ast.Module) -> ast.Module:
    """Converts imports relative to a file to those of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            node.module, node.level = node.module or "solution", 0
    return tree


def _test_functions(tree: ast.Module) -> tuple[list[str], list[str]]:
    """Returns test functions and classes that nothing calls, and test functions that something calls."""
    loaded = _loaded([tree])
    waiting: list[str] = []
    called: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            (called if node.name in loaded else waiting).append(node.name)
        elif isinstance(node, ast.ClassDef) and (
            node.name.startswith("Test") or any(_last(base).endswith("TestCase") for base in node.bases)
        ):
            waiting.append(node.name)
    return waiting, called


def _last(base: ast.expr) -> str:
    return base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""


def _runs(statement: ast.stmt, functions: set[str]) -> bool:
    """Returns True if it asserts something or calls one of the functions while the module runs."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return False
    return any(
        isinstance(node, ast.Assert | ast.Raise)
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions)
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.startswith("assert"))
        for node in ast.walk(statement)
    )


def _imported(trees: Sequence[ast.Module]) -> list[str]:
    """Returns the roots of imported modules."""
    found = []
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Import):
            found += [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.module or "solution").partition(".")[0])
    return found


def _loaded(trees: Sequence[ast.Module]) -> set[str]:
    return {
        node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }


def _uses(trees: Sequence[ast.Module]) -> set[str]:
    """Returns names that are used alone somewhere, not only for an attribute."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    of_attributes = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    return {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in of_attributes}


def _defined(trees: Sequence[ast.Module]) -> set[str]:
    names: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    return names
