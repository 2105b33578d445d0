"""Values of expressions in a Python script, as far as they follow from literals; the script is read, and never run."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_SIGNS: dict[type, Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Not: operator.not_}
_LARGEST = 64
"""Largest exponent that is evaluated."""
OTHER = ast.Constant(...)
"""Value of a variable to which something complex is assigned."""
_METHODS = ("update", "setdefault", "pop", "popitem", "clear")
"""Methods that change a mapping."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.Match, ast.ExceptHandler)
ERRORS = (ValueError, TypeError, SyntaxError, ArithmeticError, MemoryError, RecursionError)


class Values:
    """Variables of a script, with all its functions together."""

    def __init__(self, nodes: list[ast.AST]):
        self.assigned: dict[str, list[ast.expr]] = {}
        """Variable → everything that is assigned to it, in order."""
        self.defaults: dict[str, str] = {}
        """Parameter of a function → its default."""
        self.options = dict(filter(None, map(_option, nodes)))
        """Option of the script's own command line → its default."""
        self.changed = {each.value.id for each in nodes if _changes(each) and isinstance(each.value, ast.Name)}
        """Variables with mappings that are changed later."""
        simple = {id(target): value for node in nodes for target, value in _assignments(node)}
        for node in nodes:
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                self.assigned.setdefault(node.id, []).append(simple.get(id(node), OTHER))
            elif isinstance(node, ast.arg):
                self.assigned.setdefault(node.arg, []).append(OTHER)
            elif isinstance(node, _Function):
                self._parameters(node.args)

    def _parameters(self, of: ast.arguments) -> None:
        parameters = [*of.posonlyargs, *of.args]
        pairs = [*zip(parameters[len(parameters) - len(of.defaults) :], of.defaults, strict=True)]
        pairs += [(each, default) for each, default in zip(of.kwonlyargs, of.kw_defaults, strict=True) if default is not None]
        self.defaults |= {parameter.arg: ast.unparse(default) for parameter, default in pairs}

    def known(self, value: ast.expr, depth: int = 0) -> ast.expr:
        """Returns a variable's value if only one thing is assigned to it."""
        if isinstance(value, ast.Name) and depth < 8 and len(assigned := self.assigned.get(value.id, [])) == 1:
            return self.known(assigned[0], depth + 1)
        return value

    def literal(self, value: ast.expr) -> Any:
        """Returns a literal. Raises one of ``ERRORS`` if the value is not one and does not follow from some."""
        value = self.known(value)
        if isinstance(value, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.FormattedValue) else part for part in value.values)
            return "".join(str(self.literal(part)) for part in parts)
        if isinstance(value, ast.List | ast.Tuple):
            return [self.literal(item) for item in value.elts]
        if isinstance(value, ast.UnaryOp) and type(value.op) in _SIGNS:
            return _SIGNS[type(value.op)](self.literal(value.operand))
        if isinstance(value, ast.BinOp) and type(value.op) in _OPERATORS:
            left, right = self.literal(value.left), self.literal(value.right)
            texts = isinstance(value.op, ast.Add) and isinstance(left, str) and isinstance(right, str)
            if not texts and not all(isinstance(each, int | float) for each in (left, right)):
                raise ValueError(ast.unparse(value))
            if isinstance(value.op, ast.Pow) and max(abs(left), abs(right)) > _LARGEST:
                raise ValueError(ast.unparse(value))
            return _OPERATORS[type(value.op)](left, right)
        if (words := self.mapping(value)) is not None:
            return {name: self.literal(inner) for name, inner in words.items()}
        if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.value.id == "torch":
            return value.attr  # a type of numbers, which command lines name so
        literal = ast.literal_eval(value)
        if literal is ...:
            raise ValueError("...")
        return literal

    def mapping(self, value: ast.expr) -> Mapping[str, ast.expr] | None:
        """Returns ``{"a": 1}``, ``{**b, "a": 1}``, ``dict(b, a=1)``, ``b | c``; None for other forms, or if some keys are
        unknown.
        """
        value = self.known(value)
        parts: list[tuple[object, ast.expr]] = []  # a name and its value, or a mapping
        if isinstance(value, ast.Dict):
            parts = [
                (getattr(key, "value", ...) if key else None, of) for key, of in zip(value.keys, value.values, strict=True)
            ]
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "dict":
            parts = [*((None, each) for each in value.args), *((word.arg, word.value) for word in value.keywords)]
        elif isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr):
            parts = [(None, value.left), (None, value.right)]
        else:
            return None
        whole: dict[str, ast.expr] = {}
        for name, inner in parts:
            more = {name: inner} if isinstance(name, str) else self.mapping(inner) if name is None else None
            if more is None or (isinstance(inner, ast.Name) and name is None and inner.id in self.changed):
                return None
            whole |= more
        return whole


def _option(node: ast.AST) -> tuple[str, str] | None:
    """Returns name and default of ``add_argument("--name", default=1)``, or of a field ``name: int = 1`` of a class."""
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument" and node.args:
        name = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
        default = next((word.value for word in node.keywords if word.arg == "default"), None)
        return (name.lstrip("-").replace("-", "_"), ast.unparse(default)) if isinstance(name, str) and default else None
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        words = node.value.keywords if isinstance(node.value, ast.Call) else []
        field = next((word.value for word in words if word.arg == "default"), None if words else node.value)
        return (node.target.id, ast.unparse(field)) if field is not None else None
    return None


def _changes(node: ast.AST) -> TypeGuard[ast.Subscript | ast.Attribute]:
    """Returns True for the place of a mapping that changes, or the method that changes it."""
    if isinstance(node, ast.Subscript):
        return not isinstance(node.ctx, ast.Load)
    return isinstance(node, ast.Attribute) and node.attr in _METHODS


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        yield node.target, node.value


def settings_of(variable: str, tree: ast.AST) -> Iterator[tuple[str, ast.expr, int, bool]]:
    """Yields lines ``VARIABLE.NAME = VALUE`` and ``VARIABLE["NAME"] = VALUE``: name, value, line, and True if the line may not
    run.
    """

    def search(node: ast.AST, may: bool) -> Iterator[tuple[str, ast.expr, int, bool]]:
        target = node.target if isinstance(node, ast.AugAssign | ast.AnnAssign) else None
        pairs = [(target, OTHER)] if isinstance(node, ast.AugAssign) and target is not None else [*_assignments(node)]
        for each, value in pairs:
            if (name := _item(each, variable)) is not None:
                yield name, value, each.lineno, may
        if isinstance(node, ast.Call) and _changes(node.func) and ast.unparse(node.func.value) == variable:
            yield from ((name, value, node.lineno, may) for name, value in _updates(node))
        for each in node.targets if isinstance(node, ast.Delete) else ():
            if _item(each, variable) is not None:
                yield "...", OTHER, each.lineno, may
        branches = isinstance(node, _BRANCHES) and not (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test))
        for child in ast.iter_child_nodes(node):
            yield from search(child, may or branches)

    return search(tree, False)


def _item(target: ast.expr, variable: str) -> str | None:
    """Returns the item of the variable that is assigned."""
    of = target.value if isinstance(target, ast.Attribute | ast.Subscript) else None
    if not (isinstance(of, ast.Name) and of.id == variable):
        return None
    if isinstance(target, ast.Attribute):
        return target.attr
    key = target.slice.value if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant) else None
    return key if isinstance(key, str) else "..."


def _updates(call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """Yields the items of ``VARIABLE.update({"a": 1}, b=2)``."""
    for each in call.args:
        names = (
            [key.value if isinstance(key, ast.Constant) else None for key in each.keys]
            if isinstance(each, ast.Dict)
            else [None]
        )
        values = each.values if isinstance(each, ast.Dict) else [OTHER]
        yield from ((name if isinstance(name, str) else "...", value) for name, value in zip(names, values, strict=True))
    yield from ((word.arg or "...", word.value if word.arg else OTHER) for word in call.keywords)
