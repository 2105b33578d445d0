"""Sums of a shell: ``$((A * B / C))``."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_COMPARISONS: dict[type, Callable[[int, int], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_CHOICE = re.compile(r"([^?:]+)\?([^?:]+):([^?:]+)")
_MOST = 2**63


def evaluate(text: str, number: Callable[[str], int]) -> int:
    """Returns the value, in whole numbers.

    Args:
        number: returns the value of a variable.

    Raises:
        ValueError: it has no value, or its form is unknown here.
    """
    if choice := _CHOICE.fullmatch(text):
        return evaluate(choice[2 if evaluate(choice[1], number) else 3], number)
    try:
        tree = ast.parse(text.replace("&&", " and ").replace("||", " or ").strip(), mode="eval").body
    except (SyntaxError, MemoryError) as error:
        raise ValueError(text) from error
    return _value(tree, number)


def _value(node: ast.expr, number: Callable[[str], int]) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.Name(id=name):
            return number(name)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner, number)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _value(inner, number)
        case ast.BinOp(left=left, op=op, right=right):
            return _binary(op, _value(left, number), _value(right, number))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
            return int(_COMPARISONS[type(op)](_value(left, number), _value(right, number)))
        case ast.BoolOp(op=op, values=values):
            truths = [bool(_value(each, number)) for each in values]
            return int(all(truths) if isinstance(op, ast.And) else any(truths))
    raise ValueError(ast.unparse(node))


def _binary(op: ast.operator, left: int, right: int) -> int:
    if isinstance(op, ast.Div | ast.Mod):
        if right == 0:
            raise ValueError("division by zero")
        whole = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)  # towards zero, as in a shell
        return whole if isinstance(op, ast.Div) else left - right * whole
    if isinstance(op, ast.Pow):
        if not 0 <= right < 64:
            raise ValueError("a power that is too large")
        result = left**right
    elif isinstance(op, ast.LShift | ast.RShift):
        if not 0 <= right < 64:
            raise ValueError("a shift that is too large")
        result = left << right if isinstance(op, ast.LShift) else left >> right
    elif type(op) in _OPERATORS:
        result = _OPERATORS[type(op)](left, right)
    else:
        raise ValueError(ast.unparse(op))
    if not -_MOST <= result < _MOST:
        raise ValueError("a number that is too large")
    return result
