"""The computer algebra: math-verify's parser and sympy. Only worker processes import this module."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from math_verify import parse as parse_text
from math_verify import verify
from sympy.core.function import AppliedUndef

from rlhf_plugin_math_verifier import formulas
from rlhf_plugin_math_verifier.answers import Answer
from rlhf_plugin_math_verifier.comparing import Verdict
from rlhf_plugin_math_verifier.judging import Unreadable

DIGITS = 40
_POINTS = 3
_CONVERSION = ConversionConfig(lowercase_symbols=False)
_CONSTANTS = {sympy.Symbol(formulas.EULER, real=True): sympy.E, sympy.Symbol(formulas.IMAGINARY, real=True): sympy.I}
_COUNTERS = frozenset("nkmijpqrst")
"""Letters that often stand for whole numbers."""
_LOGARITHM = re.compile(r"\\log(?![_a-z])")
ZERO = sympy.Rational(1, 10**30)
"""Largest error relative to the compared values, computed with ``DIGITS`` digits, that counts as no difference."""


@lru_cache(maxsize=512)
def parse(latex: str) -> Any:
    """Returns the expression, with decimals as fractions and ``f(x)`` as a symbol. Raises the parser's errors."""
    expression = latex2sympy(
        latex, is_real=True, convert_degrees=True, normalization_config=None, conversion_config=_CONVERSION
    )
    if not isinstance(expression, sympy.Expr | sympy.MatrixBase | sympy.MatrixExpr):
        raise ValueError("no expression")
    expression = expression.subs(_CONSTANTS)
    expression = expression.replace(
        lambda each: isinstance(each, AppliedUndef), lambda each: sympy.Symbol(str(each), real=True)
    )
    expression = expression.replace(lambda each: each.is_Float, lambda each: sympy.Rational(str(each)))
    if expression in (sympy.nan, sympy.zoo):
        raise ValueError("no value")
    return expression


def label(latex: str) -> Any:
    """Returns the label's expression. Raises ``Unreadable``."""
    try:
        return parse(latex)
    except Exception as error:
        raise Unreadable from error


def same(own: Any, said: Any, decimals: int, *, rounded: bool = False) -> Verdict:
    """Compares two expressions: as numbers, or wherever both are defined. ``rounded``: they contain decimals."""
    if own == said:
        return "right"
    if isinstance(own, sympy.MatrixBase | sympy.MatrixExpr) or isinstance(said, sympy.MatrixBase | sympy.MatrixExpr):
        return _same_matrix(own, said, decimals)
    symbols = sorted(own.free_symbols | said.free_symbols, key=str)
    if not symbols:
        return "right" if _equal(own, said, decimals) else "wrong"
    own, said = own.doit(), said.doit()
    if own == said:
        return "right"

    def agree(places: Iterator[Mapping[Any, Any]]) -> bool | None:
        return _agree(own, said, places, decimals if rounded else None)

    positive = agree(_places(symbols, positive=True))
    if positive is None:  # it has no values, as a sum without an end
        return "right" if verify(own, said, timeout_seconds=None) else "wrong"
    if positive:
        return "unjudged" if agree(_places(symbols, positive=False)) is False else "right"
    if {str(symbol) for symbol in symbols} <= _COUNTERS and agree(_whole_numbers(symbols)):
        return "unjudged"
    folded = {symbol: sympy.Symbol(str(symbol).lower(), real=True) for symbol in symbols}
    if own.free_symbols != said.free_symbols and len(set(folded.values())) < len(symbols):
        return "wrong" if same(own.subs(folded), said.subs(folded), decimals, rounded=rounded) == "wrong" else "unjudged"
    return "wrong"


def _same_matrix(own: Any, said: Any, decimals: int) -> Verdict:
    own, said = (side.doit() if hasattr(side, "doit") else side for side in (own, said))
    if not (hasattr(own, "shape") and hasattr(said, "shape")) or own.shape != said.shape:
        return "wrong"
    verdicts = {same(a, b, decimals) for a, b in zip(sympy.Matrix(own), sympy.Matrix(said), strict=True)}
    return "wrong" if "wrong" in verdicts else "unjudged" if "unjudged" in verdicts else "right"


def _equal(own: Any, said: Any, decimals: int) -> bool:
    """Returns True if two constants are equal by the rule of ``comparing.close``."""
    if own.is_infinite or said.is_infinite:
        return bool(own.doit() == said.doit())
    difference = (own - said).doit()
    if difference == 0:
        return True
    size, other, distance = (value(each, {}) for each in (own, said, difference))
    if size is None or other is None or distance is None:
        return False
    size, other, distance = abs(size), abs(other), abs(difference if difference.is_Rational else distance)
    if not difference.is_Rational and distance <= ZERO * max(size, other):
        return True
    return bool(distance <= min(sympy.Rational(1, 2 * 10**decimals), size / 10 ** (decimals // 2)))


def _agree(own: Any, said: Any, places: Iterator[Mapping[Any, Any]], decimals: int | None) -> bool | None:
    """Returns True if both have the same values at the places where they have any; None if these are fewer than two."""
    compared = 0
    for place in places:
        one, other = value(own, place), value(said, place)
        if one is None or other is None:
            if (one is None) != (other is None):
                return False
            continue
        compared += 1
        size = max(abs(one), abs(other))
        bound = ZERO * size if decimals is None else min(sympy.Rational(2, 10**decimals), size / 10 ** (decimals // 2))
        if abs(one - other) > bound:
            return False
    return True if compared >= 2 else None


def value(expression: Any, place: Mapping[Any, Any]) -> Any:
    """Returns the value at a place; None if there is none."""
    found = expression.evalf(DIGITS, subs=dict(place)) if place else expression.evalf(DIGITS)
    parts = found.as_real_imag()
    finite = all(isinstance(part, sympy.Float | sympy.Rational) for part in parts)
    return parts[0] + parts[1] * sympy.I if finite else None


def _places(symbols: list[Any], *, positive: bool) -> Iterator[dict[Any, Any]]:
    """Yields random points, the same in every run."""
    source = random.Random(len(symbols) + 7 * positive)
    for _ in range(_POINTS):
        yield {
            symbol: sympy.Rational(source.randint(200, 1800), 997) * (1 if positive or source.random() < 0.3 else -1)
            for symbol in symbols
        }


def _whole_numbers(symbols: list[Any]) -> Iterator[dict[Any, Any]]:
    source = random.Random(1)
    for number in range(1, 6):
        yield {symbol: number if index == 0 else source.randint(1, 6) for index, symbol in enumerate(symbols)}


def same_equation(own: Any, said: Any, *, flipped: Callable[[bool], bool] = lambda negative: True) -> Verdict:
    """Compares two differences, which must be zero for the same values: each is the other times a constant, whose sign
    ``flipped`` accepts.
    """
    if own.free_symbols != said.free_symbols:
        return "wrong"
    ratios = []
    for positive in (True, False):
        for place in _places(sorted(own.free_symbols, key=str), positive=positive):
            one, other = value(own, place), value(said, place)
            if one is not None and other:
                ratios.append(one / other)
    if len(ratios) < 2 or not ratios[0]:
        return "unjudged"
    if any(abs(ratio - ratios[0]) > ZERO * abs(ratios[0]) for ratio in ratios):
        return "wrong"
    return "right" if flipped(bool(sympy.re(ratios[0]) < 0)) else "wrong"


class Sympy:
    """Implementation of ``comparing.Algebra`` by sympy."""

    def same(self, own: str, said: str, decimals: int) -> Verdict:
        left = label(own)
        try:
            right = parse(said)
        except Exception:  # it cannot be read
            return "wrong"
        verdict = same(left, right, decimals, rounded="." in own + said)
        if verdict == "wrong" and _LOGARITHM.search(own + said):  # of base 10 or e
            natural = self.same(_LOGARITHM.sub(r"\\ln", own), _LOGARITHM.sub(r"\\ln", said), decimals)
            return "wrong" if natural == "wrong" else "unjudged"
        return verdict

    def parser_agrees(self, own: str, said: str) -> bool:
        try:
            gold, read = (parse_text(f"${side}$", parsing_timeout=None) for side in (own, said))  # type: ignore[arg-type]
            return verify(gold, read, timeout_seconds=None)
        except Exception:
            return False

    def same_equation(self, own: tuple[str, str], said: tuple[str, str]) -> Verdict:
        left = label(own[0]) - label(own[1])
        try:
            return same_equation(left, parse(said[0]) - parse(said[1]))
        except Exception:  # it cannot be read
            return "wrong"

    def same_region(self, own: Answer, said: Answer, decimals: int) -> Verdict:
        from rlhf_plugin_math_verifier.regions import same_region

        return same_region(own, said, decimals)


SYMPY = Sympy()
