"""Sets of numbers as intervals: ``x > 3`` and ``(3, \\infty)`` are the same. Only worker processes import this module."""

from __future__ import annotations

from typing import Any

import sympy

from rlhf_plugin_math_verifier.algebra import parse, same, same_equation
from rlhf_plugin_math_verifier.answers import Answer, Combined, Formula, Interval, Number, Region, Relation, Several
from rlhf_plugin_math_verifier.comparing import Verdict
from rlhf_plugin_math_verifier.judging import Unreadable
from rlhf_plugin_math_verifier.reading import latex_of

_REGIONS = {
    "reals": sympy.S.Reals,
    "integers": sympy.S.Integers,
    "naturals": sympy.S.Naturals,
    "rationals": sympy.S.Rationals,
    "complexes": sympy.S.Complexes,
    "empty": sympy.S.EmptySet,
}
_SIGNS = {"<": sympy.Lt, ">": sympy.Gt, r"\le": sympy.Le, r"\ge": sympy.Ge, r"\ne": sympy.Ne, "=": sympy.Eq}
_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", r"\ne": r"\ne", "=": "="}
_ANY = sympy.Symbol("any", real=True)


class Unsolved(Exception):
    """The set is not known."""


def same_region(label: Answer, answer: Answer, decimals: int) -> Verdict:
    """Compares the numbers of two regions; relations of several variables are the same up to a factor."""
    try:
        if isinstance(label, Relation) and isinstance(answer, Relation) and len(_symbols(label)) > 1:
            return _same_relation(label, answer)
        own, names = region(label)
    except Unsolved:
        return "unjudged"
    except Exception as error:
        raise Unreadable from error
    try:
        said, others = region(answer)
    except Unsolved:
        return "unjudged"
    except Exception:  # it cannot be read
        return "wrong"
    if not _same_set(own, said, decimals):
        return "wrong"
    return "unjudged" if names and others and names != others else "right"


def region(answer: Answer) -> tuple[Any, frozenset[str]]:
    """Returns the set, and the names of variables in its conditions."""
    if isinstance(answer, Region):
        return _REGIONS[answer.name], frozenset()
    if isinstance(answer, Interval):
        assert isinstance(answer.left, Number | Formula)
        assert isinstance(answer.right, Number | Formula)
        return _interval(answer.left, answer.right, not answer.left_closed, not answer.right_closed), frozenset()
    if isinstance(answer, Several):
        if not all(isinstance(item, Number | Formula) for item in answer.items):
            raise Unsolved
        items = [item for item in answer.items if isinstance(item, Number | Formula)]
        if answer.kind == "tuple" and len(items) == 2:
            return _interval(items[0], items[1], True, True), frozenset()
        return sympy.FiniteSet(*(parse(latex_of(item)).doit() for item in items)), frozenset()
    if isinstance(answer, Combined):
        sets, names = zip(*map(region, answer.parts), strict=True)
        joined = {"or": sympy.Union, "and": sympy.Intersection}.get(answer.how)
        return (joined(*sets) if joined else sympy.Complement(*sets)), frozenset().union(*names)
    if isinstance(answer, Relation):
        return _solutions(answer)
    raise Unsolved


def _interval(left: Number | Formula, right: Number | Formula, left_open: bool, right_open: bool) -> Any:
    return sympy.Interval(parse(latex_of(left)).doit(), parse(latex_of(right)).doit(), left_open, right_open)


def _symbols(relation: Relation) -> set[Any]:
    return {symbol for term in relation.terms if term is not None for symbol in parse(term).free_symbols}


def _solutions(relation: Relation) -> tuple[Any, frozenset[str]]:
    """Returns the solutions of a chain in one variable, which stands alone in one of its terms if there are other letters."""
    terms = [_ANY if term is None else parse(term).doit() for term in relation.terms]
    alone = [term for term in terms if term.is_Symbol]
    symbols = set().union(*(term.free_symbols for term in terms))
    if len(symbols) > 1:
        alone = [term for term in alone if sum(term in other.free_symbols for other in terms) == 1]
        middle = terms[1] if len(terms) == 3 else None
        alone = [middle] if middle in alone else alone
    variable = alone[0] if len(alone) == 1 else symbols.pop() if len(symbols) == 1 else None
    if variable is None:
        raise Unsolved
    found = sympy.S.Reals
    for left, sign, right in zip(terms, relation.signs, terms[1:], strict=False):
        found = sympy.Intersection(found, _half(variable, left, sign, right))
    return found, frozenset() if variable == _ANY else frozenset([str(variable)])


def _half(variable: Any, left: Any, sign: str, right: Any) -> Any:
    if right == variable:
        left, sign, right = right, _FLIPPED[sign], left
    if left == variable and variable not in right.free_symbols:
        infinite = sympy.oo
        return {
            "<": lambda: sympy.Interval.open(-infinite, right),
            r"\le": lambda: sympy.Interval(-infinite, right),
            ">": lambda: sympy.Interval.open(right, infinite),
            r"\ge": lambda: sympy.Interval(right, infinite),
            "=": lambda: sympy.FiniteSet(right),
            r"\ne": lambda: sympy.Complement(sympy.S.Reals, sympy.FiniteSet(right)),
        }[sign]()
    try:
        return _SIGNS[sign](left, right).as_set()
    except Exception as error:
        raise Unsolved from error


def _same_set(own: Any, said: Any, decimals: int) -> bool:
    if own == said:
        return True
    ours, theirs = _pieces(own), _pieces(said)
    if ours is None or theirs is None:
        return bool(sympy.SymmetricDifference(own, said).is_empty)
    return len(ours) == len(theirs) and all(
        a[2:] == b[2:] and all(same(x, y, decimals) == "right" for x, y in zip(a[:2], b[:2], strict=True))
        for a, b in zip(ours, theirs, strict=True)
    )


def _pieces(found: Any) -> list[tuple[Any, Any, bool, bool]] | None:
    """Returns intervals in order, with single numbers as intervals; None if it is something else."""
    pieces: list[tuple[Any, Any, bool, bool]] = []
    for piece in found.args if isinstance(found, sympy.Union) else [found]:
        if isinstance(piece, sympy.Interval):
            pieces.append((piece.start, piece.end, bool(piece.left_open), bool(piece.right_open)))
        elif isinstance(piece, sympy.FiniteSet):
            pieces += [(number, number, False, False) for number in piece]
        elif piece == sympy.S.Reals:
            pieces.append((-sympy.oo, sympy.oo, True, True))
        else:
            return None
    try:
        return sorted(pieces, key=lambda piece: (piece[0].evalf(), piece[1].evalf()))
    except TypeError:  # letters have no order
        return pieces if len(pieces) == 1 else None


def _same_relation(label: Relation, answer: Relation) -> Verdict:
    if len(label.signs) != 1 or len(answer.signs) != 1 or None in label.terms + answer.terms:
        return "right" if label == answer else "unjudged"
    own, said = (parse(side.terms[0] or "") - parse(side.terms[1] or "") for side in (label, answer))
    sign = label.signs[0]
    return same_equation(own, said, flipped=lambda negative: answer.signs[0] == (_FLIPPED[sign] if negative else sign))
