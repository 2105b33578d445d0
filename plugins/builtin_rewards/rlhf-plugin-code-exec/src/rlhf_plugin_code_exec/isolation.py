"""Tests rewritten so that a call of the solution cannot change what they expect of it.

In one process a function that empties its argument passes ``assert f(xs) == xs``. Here a solution works on copies, and its changes
come back in two places alone: after a statement that is the bare call, as ``f(xs)``, which works in place, and in a comparison
with constants, as ``k = f(xs)``, ``assert xs[:k] == [1, 2]``. Everything else that a test computes from its own values is what
it would be if the solution had changed nothing.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable

from rlhf_plugin_code_exec.contained.names import ALONE, CONTEXT, EQUAL, FIXED, SIDES

_PURE = {"len", "sorted", "list", "tuple", "set", "frozenset", "dict", "sum", "min", "max", "str", "deque", "deepcopy", "copy"}
"""Functions whose result is a constant if their arguments are, and says something about one value."""
_EQUALITIES = {f"assert{kind}Equal" for kind in ("", "List", "Dict", "Set", "Tuple", "Sequence", "Count")}
_READING = {
    "print",
    "isinstance",
    "type",
    "enumerate",
    "zip",
    "all",
    "any",
    "repr",
    "id",
    "abs",
    "round",
    "bool",
    "int",
    "float",
}
_REACHING = {"globals", "locals", "vars", "setattr", "getattr", "delattr", "sys", "gc", "inspect"}
"""Names by which tests reach variables in other ways."""
_BINDING = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For, ast.AsyncFor, ast.NamedExpr, ast.comprehension)


def isolated(code: str, names: Iterable[str]) -> str:
    """Returns the code of tests with calls of ``changes.Changes``. ``names``: functions of the solution. Raises
    ``SyntaxError``.
    """
    tree = ast.parse(code)
    return ast.unparse(ast.fix_missing_locations(_Isolating(tree, set(names)).visit(tree)))


def _named(function: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(function, ast.Load()), list(arguments), [])


def _later(expression: ast.expr) -> ast.Lambda:
    return ast.Lambda(ast.arguments([], [], None, [], [], None, []), expression)


class _Isolating(ast.NodeTransformer):
    def __init__(self, tree: ast.Module, functions: set[str]):
        self.functions = functions
        self.constants = _Constants(tree, functions)
        self.in_class = False

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._within(node, in_class=True)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._within(node, in_class=False)

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def _within(self, node: ast.AST, in_class: bool) -> ast.AST:
        outer, self.in_class = self.in_class, in_class
        self.generic_visit(node)
        self.in_class = outer
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        awaited = node.value if isinstance(node.value, ast.Await) else None
        call = awaited.value if awaited else node.value
        if not isinstance(call, ast.Call):
            return node
        name = (
            call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id if isinstance(call.func, ast.Name) else ""
        )
        if name in _EQUALITIES and len(call.args) >= 2 and not self.in_class and (tested := self._tested(*call.args[:2])):
            sides = _named(SIDES, ast.Constant(tested), *map(_later, call.args[:2]))
            call.args[:2] = [ast.Starred(sides, ast.Load())]
        elif not name.startswith("assert") and not (hasattr(builtins, name) and name not in self.functions):
            call.args = [call.func, *call.args]
            call.func = ast.Name(ALONE, ast.Load())
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        node.iter = _named(FIXED, node.iter)
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        self.generic_visit(node)
        if not self.in_class:
            node.test = self._compared(node.test)
        return node

    def _compared(self, test: ast.expr) -> ast.expr:
        """Handles comparisons that the assertion needs. Within ``or`` these are those after a call whose result may be anything,
        as in ``f(xs) or xs == [1, 2]``.
        """
        if isinstance(test, ast.BoolOp):
            calls = [isinstance(each, ast.Call) and self._is_call_of_solution(each) for each in test.values]
            needed = [isinstance(test.op, ast.And) or any(calls[:place]) for place in range(len(calls))]
            test.values = [self._compared(each) if of else each for each, of in zip(test.values, needed, strict=True)]
        elif isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
            left, right = test.left, test.comparators[0]
            if tested := self._tested(left, right):
                return _named(EQUAL, ast.Constant(tested), _later(left), _later(right))
        return test

    def _is_call_of_solution(self, call: ast.Call) -> bool:
        return isinstance(call.func, ast.Name) and call.func.id in self.functions

    def _tested(self, left: ast.expr, right: ast.expr) -> str:
        """Returns which side may be a changed argument: the other one is a constant."""
        are = [self.constants.has(side) for side in (left, right)]
        may = [self._is_one_value(side) for side in (left, right)]
        if all(are) and all(may):
            return "either"
        if are[1] and may[0]:
            return "left"
        return "right" if are[0] and may[1] else ""

    def _is_one_value(self, side: ast.expr) -> bool:
        """Returns True for one argument, or a part of it at a constant place, or up to any place. At any place would not do: a
        solution that must find ``xs[f(xs, 9)] == 9`` would bring the nine itself.
        """
        if isinstance(side, ast.Call):
            known = isinstance(side.func, ast.Name) and side.func.id in _PURE - self.functions
            return known and len(side.args) == 1 and not side.keywords and self._is_one_value(side.args[0])
        while isinstance(side, ast.Subscript | ast.Attribute):
            if isinstance(side, ast.Subscript) and not self.constants.has(side.slice):
                place = side.slice
                if not (
                    isinstance(place, ast.Slice) and not place.lower and not place.step and isinstance(place.upper, ast.Name)
                ):
                    return False
            side = side.value
        return isinstance(side, ast.Name)

    def visit_With(self, node: ast.With) -> ast.AST:
        self.generic_visit(node)
        used = {each.id for statement in node.body for each in ast.walk(statement) if isinstance(each, ast.Name)}
        alone = all(hasattr(builtins, name) or name in (ALONE, FIXED) for name in used) and not used & self.functions
        for item in node.items:
            item.context_expr = _named(CONTEXT, item.context_expr, ast.Constant(alone))
        return node


class _Constants:
    """Names and expressions whose value the solution has no part in, other than by changing its arguments."""

    def __init__(self, tree: ast.Module, functions: set[str]):
        self.pure, self.functions = _PURE - functions, functions
        self.bound: dict[str, list[ast.expr | None]] = {}
        self.mixed: set[str] = set()
        """Names whose value may have got something of the solution."""
        self.links: list[set[str]] = []
        """Names that may be of one value, or of parts of it."""
        nodes = list(ast.walk(tree))
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        for node in nodes:
            self._note(node)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and id(node) not in called:
                self.mixed |= _names(node) & _stored(nodes)  # a method may be called elsewhere
        for link in self.links * len(self.links):
            if link & self.mixed:
                self.mixed |= link
        self.names = set() if _REACHING & _names(tree) else {*self.bound} - functions - self.mixed
        while dropped := {name for name in self.names if not all(each and self.has(each) for each in self.bound[name])}:
            self.names -= dropped

    def _bind(self, names: Iterable[str], *values: ast.expr | None) -> None:
        for name in names:
            self.bound.setdefault(name, []).extend(values)

    def _note(self, node: ast.AST) -> None:
        """Notes what a node makes of names."""
        if isinstance(node, _BINDING):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = node.iter if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension) else node.value
            for target in targets:
                self._bind(_names(target), value)
                if not isinstance(value, ast.Call):
                    self.links.append(_names(target) | (_names(value) if value else set()))
                if any(isinstance(each, ast.Subscript | ast.Attribute) for each in ast.walk(target)) and _names(value):
                    self.mixed |= _names(target)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if not node.func.attr.startswith("assert") and any(map(_names, [*node.args, *node.keywords])):
                self.mixed |= _names(node.func)
        elif isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            if not (name in self.functions or name in self.pure | _READING):  # it may change its arguments
                self.mixed |= {each for argument in (*node.args, *node.keywords) for each in _names(argument)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorated = {name: values for each in node.decorator_list for name, values in _parametrized(each).items()}
            for each in (each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)):
                self._bind([each], decorated.get(each))
            self._bind([node.name], None)
        else:
            self._bind(_names_in(node), None)

    def has(self, node: ast.AST | None) -> bool:
        if node is None or isinstance(node, ast.Constant):
            return True
        if isinstance(node, ast.Name):
            return node.id in self.names
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Attribute) and function.attr in ("copy", "deepcopy"):
                return all(map(self.has, node.args)) and (self.has(function.value) or bool(node.args))
            pure = isinstance(function, ast.Name) and function.id in self.pure
            return pure and all(map(self.has, node.args)) and not node.keywords
        if isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict | ast.UnaryOp | ast.BinOp | ast.Subscript | ast.Slice):
            return all(self.has(each) for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr))
        return False


def _names(node: ast.AST | None) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} if node else set()


def _stored(nodes: Iterable[ast.AST]) -> set[str]:
    return {each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}


def _names_in(node: ast.AST) -> list[str]:
    """Returns names that a node binds to something else than an expression's value."""
    if isinstance(node, ast.Lambda):
        return [each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)]
    if isinstance(node, ast.withitem) and node.optional_vars:
        return [each.id for each in ast.walk(node.optional_vars) if isinstance(each, ast.Name)]
    if isinstance(node, ast.Global | ast.Nonlocal):
        return node.names
    if isinstance(node, ast.alias):
        return [(node.asname or node.name).partition(".")[0]]
    if isinstance(node, ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        return [node.name]
    return []


def _parametrized(decorator: ast.expr) -> dict[str, ast.expr]:
    """Returns parameters of a test and the values that this decorator gives them."""
    if not (
        isinstance(decorator, ast.Call) and getattr(decorator.func, "attr", "") == "parametrize" and len(decorator.args) > 1
    ):
        return {}
    names, values = decorator.args[:2]
    if isinstance(names, ast.Constant) and isinstance(names.value, str):
        return dict.fromkeys(map(str.strip, names.value.split(",")), values)
    named = names.elts if isinstance(names, ast.List | ast.Tuple) else []
    return dict.fromkeys([str(each.value) for each in named if isinstance(each, ast.Constant)], values)
