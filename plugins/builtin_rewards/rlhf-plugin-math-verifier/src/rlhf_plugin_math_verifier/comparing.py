"""Compares an answer with the label by kind. Questions that only a computer algebra system can answer go to ``Algebra``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, Protocol

from rlhf_plugin_math_verifier import units, vocabulary
from rlhf_plugin_math_verifier.answers import (
    Answer,
    Choice,
    Combined,
    Doubtful,
    Formula,
    Interval,
    Moment,
    Named,
    Number,
    Numeral,
    Ratio,
    Region,
    Relation,
    Residue,
    Several,
    Words,
)
from rlhf_plugin_math_verifier.reading import latex_of

Verdict = Literal["right", "wrong", "unjudged"]
MAX_ITEMS = 40
PI = Fraction(31415926535897932384626433832795028841971693993751, 10**49)
_BESIDE_LETTERS = re.compile(r"\\cdot|[\s/^{}0-9-]")
_BINARY = {"yes", "no", "true", "false"}
_EMPTY = {
    "no solution",
    "no solutions",
    "none",
    "no real solutions",
    "no real solution",
    "no solutions exist",
    "no solution exists",
}


class Algebra(Protocol):
    """Interface for computing formulas; every method may raise ``Unreadable`` for the label."""

    def __hash__(self) -> int: ...

    def same(self, label: str, answer: str, decimals: int) -> Verdict:
        """Compares the values of two formulas."""
        ...

    def parser_agrees(self, label: str, answer: str) -> object:
        """Returns whether math-verify alone calls the answer right."""
        ...

    def same_equation(self, label: tuple[str, str], answer: tuple[str, str]) -> Verdict:
        """Compares two equations, which must hold for the same values."""
        ...

    def same_region(self, label: Answer, answer: Answer, decimals: int) -> Verdict:
        """Compares two sets of numbers, or conditions on variables."""
        ...


def close(label: Fraction, value: Fraction, decimals: int) -> bool:
    """Returns True if equal, or if the difference is at most half a unit of the last of ``decimals`` places and at most the
    label divided by ``10**(decimals // 2)``.
    """
    if label == value:
        return True
    return abs(label - value) <= min(Fraction(1, 2 * 10**decimals), abs(label) / 10 ** (decimals // 2))


def compare(label: Answer, answer: Answer, decimals: int, algebra: Algebra) -> Verdict:
    """Returns ``right``, ``wrong``, or ``unjudged`` if a person would have to decide. ``label`` is not ``Doubtful``."""
    return _Comparison(decimals, algebra).of(label, answer)


class _Comparison:
    def __init__(self, decimals: int, algebra: Algebra):
        self.decimals, self.algebra = decimals, algebra

    def of(self, label: Answer, answer: Answer) -> Verdict:
        if isinstance(answer, Doubtful):
            return self._doubtful(label, answer)
        if isinstance(label, Choice) or isinstance(answer, Choice):
            return self._choice(label, answer)
        if isinstance(label, Named) or isinstance(answer, Named):
            return self._named(label, answer)
        if isinstance(label, Words) or isinstance(answer, Words):
            return _words(label, answer)
        if isinstance(label, Moment | Ratio) or isinstance(answer, Moment | Ratio):
            return self._moment_or_ratio(label, answer)
        if isinstance(label, Numeral) or isinstance(answer, Numeral):
            return _numeral(label, answer)
        if isinstance(label, Residue) or isinstance(answer, Residue):
            return _residues(label, answer)
        if _is_region(label) or _is_region(answer):
            return self._region(label, answer)
        if isinstance(label, Several) or isinstance(answer, Several):
            return self._several(label, answer)
        assert isinstance(label, Number | Formula)
        assert isinstance(answer, Number | Formula)
        return self._quantity(label, answer)

    def _doubtful(self, label: Answer, answer: Doubtful) -> Verdict:
        """Compares a text that was not fully understood, which is never right. It is wrong, too, unless the understood part is
        the label.
        """
        if answer.core is None or answer.denied:
            return "wrong"
        return "wrong" if self.of(label, answer.core) == "wrong" else "unjudged"

    def _choice(self, label: Answer, answer: Answer) -> Verdict:
        if isinstance(label, Choice) and isinstance(answer, Choice):
            if label.letter != answer.letter:
                return "wrong"
            other = (
                label.rest
                and answer.rest
                and not isinstance(label.rest, Doubtful)
                and self.of(label.rest, answer.rest) == "wrong"
            )
            plain = isinstance(label.rest, Number) and isinstance(answer.rest, Number)
            return "unjudged" if other and plain else "right"
        own, other_side = (label, answer) if isinstance(label, Choice) else (answer, label)
        assert isinstance(own, Choice)
        if own is label and other_side == Formula(own.letter):
            return "right"  # "b" for (B)
        if own.rest is None or isinstance(own.rest, Doubtful):
            return "wrong"
        return self.of(own.rest, other_side) if own is label else self.of(other_side, own.rest)

    def _named(self, label: Answer, answer: Answer) -> Verdict:
        if isinstance(label, Named) and isinstance(answer, Named):
            verdict = self.of(label.value, answer.value)
            if verdict == "right" and label.name == answer.name:
                return "right"
            equations = self._equations(label, answer)
            return equations if equations != "wrong" or verdict == "wrong" else "unjudged"
        if isinstance(label, Named):
            if not label.asked:
                return "wrong"
            return self.of(label.value, answer)
        assert isinstance(answer, Named)
        last = self.of(label, answer.value)
        others = [self.of(label, value) for value in answer.also if answer.name == "" or answer.approximate]
        if answer.approximate and "right" in others:
            return "right"
        if last == "right" and answer.asked and "wrong" not in others:
            return "right"
        return "wrong" if {last, *others} == {"wrong"} else "unjudged"

    def _equations(self, label: Named, answer: Named) -> Verdict:
        sides = [
            (named.name, latex_of(named.value))
            for named in (label, answer)
            if isinstance(named.value, Number | Formula) and named.name and not named.also and "text" not in named.name
        ]
        return self.algebra.same_equation(sides[0], sides[1]) if len(sides) == 2 else "wrong"

    def _moment_or_ratio(self, label: Answer, answer: Answer) -> Verdict:
        if isinstance(label, Moment) and isinstance(answer, Moment):
            return _moments(label, answer)
        if isinstance(label, Ratio) and isinstance(answer, Ratio):
            if label.parts == answer.parts:
                return "right"
            if len(label.parts) != len(answer.parts) or not all(label.parts + answer.parts):
                return "wrong"
            same = len({a / b for a, b in zip(label.parts, answer.parts, strict=True)}) == 1
            return "wrong" if not same else "unjudged" if label.clock or answer.clock else "right"
        ratio = label if isinstance(label, Ratio) else answer
        other = answer if ratio is label else label
        if not isinstance(ratio, Ratio):
            moment = label if isinstance(label, Moment) else answer
            number = answer if moment is label else label
            assert isinstance(moment, Moment)
            hour = isinstance(number, Number) and moment.minutes is not None and (number.value * 60 - moment.minutes) % 720 == 0
            return "unjudged" if hour else "wrong"  # "9 a.m." for 9
        if isinstance(other, Moment):
            if other.minutes is None or not ratio.clock:
                return "wrong"
            minutes = ratio.parts[0] * 60 + ratio.parts[1]
            return (
                "right"
                if minutes == other.minutes and ratio.parts[0] > 12
                else "unjudged"
                if (minutes - other.minutes) % 720 == 0
                else "wrong"
            )
        if len(ratio.parts) != 2 or not ratio.parts[1] or not isinstance(other, Number):
            return "wrong"
        if ratio.clock and other.unit is not None and other.unit.dimensions == (("time", 1),):  # 1:30 for 1.5 hours
            shown = [(ratio.parts[0] + ratio.parts[1] / 60) * factor for factor in (3600, 60)]
            return "wrong" if other.value * other.unit.factor not in shown else "right" if ratio is label else "unjudged"
        same = close(other.value, ratio.parts[0] / ratio.parts[1], self.decimals)
        return "wrong" if not same else "unjudged" if ratio.clock or other.value.denominator == 1 else "right"

    def _region(self, label: Answer, answer: Answer) -> Verdict:
        if isinstance(label, Number | Formula) or (
            isinstance(answer, Number | Formula | Several | Numeral) and not _is_region_like(answer)
        ):
            return "wrong"
        if label == answer:
            return "right"
        return self.algebra.same_region(label, answer, self.decimals)

    def _several(self, label: Answer, answer: Answer) -> Verdict:
        if isinstance(label, Formula) or isinstance(answer, Formula):  # a sum of matrices
            own, said = _matrix_latex(label), _matrix_latex(answer)
            if own and said:
                return self.algebra.same(own, said, self.decimals)
        if isinstance(label, Several) and label.kind == "listed":
            verdict = self._several(Several("list", label.items), answer)
            one = verdict == "wrong" and any(self.of(item, answer) != "wrong" for item in label.items)
            return "unjudged" if one else verdict
        if not isinstance(label, Several) or not isinstance(answer, Several):
            return self._single(label, answer)
        if "matrix" in (label.kind, answer.kind):
            if label.kind == answer.kind:
                return self._in_order(label.items, answer.items)
            flat = [_flattened(side) for side in (label, answer)]
            verdict = self._in_order(*flat)
            return verdict if verdict == "wrong" or _is_vector(label, answer) else "unjudged"
        if label.kind == "tuple" and answer.kind == "list" and (ordered := _by_name(answer.items)) != answer.items:
            return self._in_order(label.items, ordered)
        if label.kind == answer.kind == "tuple":
            return self._in_order(label.items, answer.items)
        if label.kind == answer.kind == "list" and (named := self._by_names(label.items, answer.items)) is not None:
            return named
        if "tuple" not in (label.kind, answer.kind):
            verdict = self._in_any_order(label.items, answer.items)
            twice = label.kind == answer.kind == "list" and len(label.items) != len(answer.items)
            return "unjudged" if twice and verdict == "right" else verdict
        if "set" not in (label.kind, answer.kind) and (verdict := self._in_order(label.items, answer.items)) != "wrong":
            return verdict
        return "wrong" if self._in_any_order(label.items, answer.items) == "wrong" or label.kind == "tuple" else "unjudged"

    def _by_names(self, label: Sequence[Answer], answer: Sequence[Answer]) -> Verdict | None:
        """Compares values with names: ``y=4, x=3`` is ``x=3, y=4``. Values alone stand in the label's order."""
        own = {item.name: item.value for item in label if isinstance(item, Named) and item.name}
        if len(own) != len(label) or len(label) != len(answer) or len({name[:1] for name in own}) != len(own):
            return None
        said = {item.name: item.value for item in answer if isinstance(item, Named) and item.name}
        if len(said) == len(answer):
            if own.keys() == said.keys():
                verdicts = {self.of(value, said[name]) for name, value in own.items()}
                return "wrong" if "wrong" in verdicts else "unjudged" if "unjudged" in verdicts else "right"
            return "wrong" if own.keys() & said.keys() else None
        if said or (verdict := self._in_order(label, answer)) != "wrong":
            return None if said else verdict
        return "wrong" if self._in_any_order(label, answer) == "wrong" else "unjudged"

    def _single(self, label: Answer, answer: Answer) -> Verdict:
        if isinstance(label, Several):
            return self._in_any_order(label.items, [answer]) if label.kind != "tuple" else "wrong"
        assert isinstance(answer, Several)
        if (mixed := _mixed(answer.items)) is not None and self.of(label, mixed) == "right":
            return "unjudged"  # "2 and 1/2"
        return self._in_any_order([label], answer.items) if answer.kind != "tuple" else "wrong"

    def _in_order(self, label: Sequence[Answer], answer: Sequence[Answer]) -> Verdict:
        if len(label) != len(answer) or len(label) > MAX_ITEMS:
            return "wrong"
        verdicts: set[Verdict] = set()
        for one, other in zip(label, answer, strict=True):
            verdicts.add(self._item(one, other))
            if "wrong" in verdicts:
                return "wrong"
        return "unjudged" if "unjudged" in verdicts else "right"

    def _item(self, label: Answer, answer: Answer) -> Verdict:
        """Compares items of others, where {1} is not 1."""
        label, answer = (
            side.value if isinstance(side, Named) and isinstance(side.value, Several) else side for side in (label, answer)
        )
        return self.of(label, answer) if isinstance(label, Several) == isinstance(answer, Several) else "wrong"

    def _in_any_order(self, label: Sequence[Answer], answer: Sequence[Answer]) -> Verdict:
        """Compares items in any order: each must have an equal one on the other side; one that occurs twice counts once."""
        if max(len(label), len(answer)) > MAX_ITEMS:
            return "wrong"
        doubt = False
        found: set[int] = set()
        for one in label:
            verdicts = [self._item(one, other) for other in answer]
            matches = {i for i, verdict in enumerate(verdicts) if verdict == "right"}
            if not matches:
                matches = {i for i, verdict in enumerate(verdicts) if verdict == "unjudged"}
                doubt = True
            if not matches:
                return "wrong"
            found |= matches
        return "wrong" if len(found) < len(answer) else "unjudged" if doubt else "right"

    def _quantity(self, label: Number | Formula, answer: Number | Formula) -> Verdict:
        """Compares values, and units if both have one."""
        own, other = label.unit, answer.unit
        if own and other and own != other:
            return self._with_units(label, answer, own, other)
        verdict = self._value(label, answer, Fraction(1))
        if verdict == "wrong" and label.dozens != answer.dozens:  # "5 dozen" for 5: the question may have asked for dozens
            dozen = Fraction(12) if label.dozens else Fraction(1, 12)
            return "wrong" if self._value(label, answer, dozen) == "wrong" else "unjudged"
        if verdict != "wrong" or own == other:
            return "unjudged" if verdict == "wrong" and _is_unit_or_letter(label, answer) else verdict
        if units.PERCENT in (own, other):
            verdict = self._value(label, answer, Fraction(100) if own == units.PERCENT else Fraction(1, 100))
        elif (
            own is None
            and other is not None
            and other.dimensions
            and other != units.DEGREE
            and isinstance(answer, Number)
            and answer.value.denominator > 1
        ):
            smaller = any(self._value(label, answer, Fraction(factor)) == "right" for factor in (12, 60, 100, 1000))
            return "unjudged" if smaller else "wrong"  # "1 hour 15 minutes" for 75
        elif own == units.DEGREE:
            return self._degrees(label, answer)
        elif other == units.DEGREE and own is None:
            return self._degrees(answer, label)
        return verdict

    def _with_units(self, label: Number | Formula, answer: Number | Formula, own: units.Unit, other: units.Unit) -> Verdict:
        if {own, other} == {units.DEGREE, units.RADIAN}:
            degrees, radians = (label, answer) if own == units.DEGREE else (answer, label)
            return self._degrees(degrees, radians)
        if own.dimensions == other.dimensions and (own.words & other.words or not own.words or not other.words):
            return self._value(label, answer, other.factor / own.factor)
        known = own.dimensions and other.dimensions and not own.words and not other.words
        return "wrong" if known or self._value(label, answer, Fraction(1)) == "wrong" else "unjudged"

    def _degrees(self, degrees: Number | Formula, radians: Number | Formula) -> Verdict:
        if isinstance(degrees, Number) and isinstance(radians, Number):
            return "right" if close(degrees.value * PI / 180, radians.value, self.decimals) else "wrong"
        return self.algebra.same(rf"({latex_of(degrees)})\cdot\frac{{\pi}}{{180}}", latex_of(radians), self.decimals)

    def _value(self, label: Number | Formula, answer: Number | Formula, factor: Fraction) -> Verdict:
        if isinstance(label, Number) and isinstance(answer, Number):
            return "right" if close(label.value, answer.value * factor, self.decimals) else "wrong"
        latex = latex_of(answer)
        if factor != 1:
            latex = rf"({latex})\cdot\frac{{{factor.numerator}}}{{{factor.denominator}}}"
        return self.algebra.same(latex_of(label), latex, self.decimals)


def _is_unit_or_letter(label: Number | Formula, answer: Number | Formula) -> bool:
    """Returns True for ``5m`` or ``5N\\cdot m`` in place of 5: the letters may be a unit or not."""
    short, long = sorted((side.latex if isinstance(side, Formula) else str(side.value) for side in (label, answer)), key=len)
    letters = _BESIDE_LETTERS.sub("", long.removeprefix(short))
    return long.startswith(short) and 0 < len(letters) <= 3 and set(letters) <= units.LETTERS


def _words(label: Answer, answer: Answer) -> Verdict:
    if isinstance(label, Words) and isinstance(answer, Words):
        if label.text in _EMPTY and any(answer.text.endswith(text) for text in _EMPTY if " " in text):
            return "right"
        if label.text == answer.text or _affirms(label.text, answer.text.split()):
            return "right"
        own, said = label.text.split(), answer.text.split()
        inside = any(said[i : i + len(own)] == own for i in range(len(said)))
        return "unjudged" if inside and not vocabulary.denies(said) and not any(map(vocabulary.changes, said)) else "wrong"
    other = answer if isinstance(label, Words) else label
    words = label if isinstance(label, Words) else answer
    assert isinstance(words, Words)
    if words is label and isinstance(other, Several) and all(isinstance(item, Words) for item in other.items):  # "Yes, it is"
        said = [word for item in other.items if isinstance(item, Words) for word in item.text.split()]
        if _affirms(label.text, said):
            return "right"
        return "unjudged" if words in other.items and label.text not in _BINARY else "wrong"  # "Paris, France"
    if words is answer and words.text == "none" and isinstance(other, Number) and other.value == 0:
        return "unjudged"  # how many there are: none
    return "right" if isinstance(other, Region) and other.name == "empty" and words.text in _EMPTY else "wrong"


def _affirms(label: str, said: Sequence[str]) -> bool:
    """Returns True for "yes it is" in place of "yes": it begins so, and says nothing else of the kind."""
    return label in _BINARY and said[:1] == [label] and not set(said[1:]) & _BINARY and not vocabulary.denies(said[1:])


def _residues(label: Answer, answer: Answer) -> Verdict:
    """Compares classes of numbers. The smallest number stands for its class; another number of it may not be what was asked for."""
    if label == answer:
        return "right"
    residue, other = (label, answer) if isinstance(label, Residue) else (answer, label)
    if not isinstance(residue, Residue) or not isinstance(other, Number):
        return "wrong"
    if (other.value - residue.value) % residue.modulus:
        return "wrong"
    return "right" if other.value == residue.value else "unjudged"


def _numeral(label: Answer, answer: Answer) -> Verdict:
    """Compares a numeral: it is the label's if digits and base are. In another base, or none, it may not be what was asked for."""
    if label == answer:
        return "right"
    values = [
        int(side.digits, side.base) if isinstance(side, Numeral) else side.value if isinstance(side, Number) else None
        for side in (label, answer)
    ]
    if None in values:
        return "wrong"
    bases = {side.base for side in (label, answer) if isinstance(side, Numeral)}
    if bases == {10}:
        return "right" if values[0] == values[1] else "wrong"
    digits = [
        side.digits if isinstance(side, Numeral) else str(side.value) if isinstance(side, Number) else ""
        for side in (label, answer)
    ]
    same_digits = digits[0] == digits[1] and isinstance(label, Numeral) and isinstance(answer, Number)
    return "unjudged" if values[0] == values[1] or same_digits else "wrong"


def _moments(label: Moment, answer: Moment) -> Verdict:
    if label == answer:
        return "right"
    if isinstance(label.date, tuple) and isinstance(answer.date, tuple):
        return "unjudged" if label.date[1:] == answer.date[1:] and None in (label.date[0], answer.date[0]) else "wrong"
    text, date = (label.date, answer.date) if isinstance(label.date, str) else (answer.date, label.date)
    if isinstance(text, str) and isinstance(date, tuple):
        a, b, year = map(int, text.split("/"))
        return "unjudged" if date in ((year, a, b), (year, b, a), (None, a, b), (None, b, a)) else "wrong"
    return "wrong"


def _is_region(answer: Answer) -> bool:
    return isinstance(answer, Interval | Region | Relation | Combined)


def _is_region_like(answer: Answer) -> bool:
    r"""Returns True for something that may be a region, beside one: ``(0, 1)``, ``\{1, 2\}``."""
    return isinstance(answer, Several) and answer.kind in ("tuple", "set", "list")


def _is_vector(label: Several, answer: Several) -> bool:
    """Returns True for a tuple and a matrix of one row or one column."""
    matrix, other = (label, answer) if label.kind == "matrix" else (answer, label)
    rows = [item.items for item in matrix.items if isinstance(item, Several)]
    return other.kind == "tuple" and (len(rows) == 1 or all(len(row) == 1 for row in rows))


def _mixed(items: Sequence[Answer]) -> Number | None:
    """Returns the mixed number that "2 and 1/2" may be."""
    numbers = [item.value for item in items if isinstance(item, Number)]
    mixed = len(numbers) == len(items) == 2 and numbers[0].denominator == 1 and 0 < numbers[1] < 1
    return Number(numbers[0] + numbers[1]) if mixed else None


def _by_name(items: Sequence[Answer]) -> Sequence[Answer]:
    """Returns ``y=5, x=2`` in the order of the letters, in which a tuple has its values."""
    names = [item.name for item in items if isinstance(item, Named) and len(item.name) == 1]
    distinct = len(names) == len(set(names)) == len(items)
    return tuple(sorted(items, key=lambda item: item.name if isinstance(item, Named) else "")) if distinct else items


def _matrix_latex(side: Answer) -> str | None:
    if isinstance(side, Formula):
        return side.latex if r"\begin{" in side.latex else None
    rows = [row.items for row in side.items if isinstance(row, Several)] if isinstance(side, Several) else []
    if not isinstance(side, Several) or side.kind != "matrix":
        return None
    cells = [[latex_of(item) if isinstance(item, Number | Formula) else None for item in row] for row in rows]
    if any(cell is None for row in cells for cell in row):
        return None
    return r"\begin{pmatrix}" + r"\\".join("&".join(map(str, row)) for row in cells) + r"\end{pmatrix}"


def _flattened(side: Several) -> list[Answer]:
    return [each for item in side.items for each in (_flattened(item) if isinstance(item, Several) else [item])]
