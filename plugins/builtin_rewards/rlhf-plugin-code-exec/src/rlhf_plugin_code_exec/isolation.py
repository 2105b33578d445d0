"""Tests rewritten so that a call of the solution cannot change what they expect of it.

In one process a function that empties its argument passes ``assert f(xs) == xs``. Here a change is made when the statement with
the call is over, a loop uses the items at its beginning, and a result is compared with the other side as it was before the
call. Functions in place still work: in ``f(xs); assert xs == [1, 2]`` no result is compared.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator

from rlhf_plugin_code_exec.contained.names import BEFORE, FIXED, SETTLE

_METHODS = {name for kind in (list, dict, set, str, bytes, tuple, int, float) for name in dir(kind)}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_ASSIGNING = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For)
_SIMPLE = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Assert, ast.Delete)


def isolated(code: str, names: Iterable[str]) -> str:
    """Returns the code of tests with calls of ``changes.Changes``. ``names``: functions of the solution. Raises
    ``SyntaxError``.
    """
    tree = ast.parse(code)
    modules = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    _compare_with_what_was(tree, set(names), modules, set())
    return ast.unparse(ast.fix_missing_locations(_Settling().visit(tree)))


def _named(function: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(function, ast.Load()), list(arguments), [])


class _Settling(ast.NodeTransformer):
    """Adds code after statements, and at the beginning of loops."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):
                setattr(node, field, [each for statement in statements for each in _with_settling(statement)])
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        """Handles ``f(xs) is None and xs == [1, 2]``: changes take effect within it."""
        self.generic_visit(node)
        goes_on = ast.Constant(isinstance(node.op, ast.And))
        last = node.values.pop()
        parts = [each for value in node.values for each in (value, _named(SETTLE, ast.Constant(False), goes_on))]
        node.values = [*parts, last]
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        node.iter = _named(FIXED, node.iter)
        return self.generic_visit(node)


def _with_settling(statement: ast.stmt) -> list[ast.stmt]:
    calls = isinstance(statement, _SIMPLE) and any(isinstance(node, ast.Call) for node in ast.walk(statement))
    meant = [ast.Constant(True)] if isinstance(statement, ast.Expr) else []  # nobody takes a result: it works in place
    return [statement, ast.Expr(_named(SETTLE, *meant))] if calls else [statement]


def _compare_with_what_was(scope: ast.AST, functions: set[str], modules: set[str], derived: set[str]) -> None:
    """Makes a comparison use the earlier state of its other side, if one side comes from the solution."""
    if isinstance(scope, _FUNCTIONS):
        functions = functions | {each.arg for each in ast.walk(scope.args) if isinstance(each, ast.arg)} - {"self"}
    nodes = list(_inside(scope))

    def of_solution(expression: ast.AST) -> bool:
        return any(
            (isinstance(node, ast.Name) and node.id in derived)
            or (isinstance(node, ast.Call) and _calls(node, functions, modules))
            for node in ast.walk(expression)
        )

    derived = set(derived)
    for _ in range(3):  # a name may come from one that is assigned further down
        for node in nodes:
            if isinstance(node, _ASSIGNING) and (value := _source(node)) is not None and of_solution(value):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                derived.update(each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
    expected: set[str] = set()
    for node in nodes:
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else getattr(node, "args", None)
        if not isinstance(sides, list) or (isinstance(node, ast.Call) and _calls(node, functions, modules)):
            continue
        told = [of_solution(side) for side in sides]
        if any(told) and not all(told):
            expected |= {each.id for side, of in zip(sides, told, strict=True) if not of for each in _names(side)}
            sides = [side if of else _Before().visit(side) for side, of in zip(sides, told, strict=True)]
            if isinstance(node, ast.Compare):
                node.left, node.comparators = sides[0], sides[1:]
            elif isinstance(node, ast.Call):
                node.args = sides
    for node in nodes:  # what an expectation was made of
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and not of_solution(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if expected & {each.id for target in targets for each in _names(target)}:
                node.value = _Before().visit(node.value)
    for node in nodes:
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            _compare_with_what_was(node, functions, modules, derived)


def _names(expression: ast.AST) -> list[ast.Name]:
    return [node for node in ast.walk(expression) if isinstance(node, ast.Name)]


def _source(node: ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For) -> ast.expr | None:
    return node.iter if isinstance(node, ast.For) else node.value


def _inside(scope: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a scope; of those that are scopes themselves, only the statement."""
    todo = list(ast.iter_child_nodes(scope))
    for node in todo:
        yield node
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            todo += ast.iter_child_nodes(node)


def _calls(call: ast.Call, functions: set[str], modules: set[str]) -> bool:
    """Returns True if it may run the solution's code."""
    function = call.func
    if isinstance(function, ast.Name):
        return function.id in functions
    if not isinstance(function, ast.Attribute):
        return True
    root: ast.expr = function
    while isinstance(root, ast.Attribute):
        root = root.value
    if isinstance(root, ast.Name) and root.id in modules:
        return False
    return function.attr not in _METHODS and not function.attr.startswith("assert")


class _Before(ast.NodeTransformer):
    """Wraps names and attributes, except those that are called."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.args = [self.visit(each) for each in node.args]
        for keyword in node.keywords:
            keyword.value = self.visit(keyword.value)
        if isinstance(node.func, ast.Attribute):
            node.func.value = self.visit(node.func.value)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return _named(BEFORE, node) if isinstance(node.ctx, ast.Load) and not hasattr(builtins, node.id) else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return _named(BEFORE, node)

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node
