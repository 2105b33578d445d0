"""The kinds of answers. A record includes the parts of a text that were not understood, so that they are not taken for
understood.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from rlhf_plugin_math_verifier.units import Unit


@dataclass(frozen=True, slots=True)
class Number:
    """A rational number with its unit or noun; ``dozens``: it was written in dozens."""

    value: Fraction
    unit: Unit | None = None
    dozens: bool = False


@dataclass(frozen=True, slots=True)
class Formula:
    """An expression in LaTeX, every token of which is known; only the algebra knows its value."""

    latex: str
    unit: Unit | None = None
    dozens: bool = False


@dataclass(frozen=True, slots=True)
class Numeral:
    """``101_2``: digits in a base."""

    digits: str
    base: int


@dataclass(frozen=True, slots=True)
class Moment:
    """A date, or a time of day in minutes; None if it is not given."""

    date: tuple[int | None, int, int] | str | None = None
    """Year, month, day; a text if their order is not known."""
    minutes: Fraction | None = None
    half: str | None = None
    """``am`` or ``pm``."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """``2:1``; ``clock``: it may be a time, such as ``10:30``."""

    parts: tuple[Fraction, ...]
    clock: bool = False


@dataclass(frozen=True, slots=True)
class Residue:
    """``2 (mod 5)``."""

    value: Fraction
    modulus: Fraction


@dataclass(frozen=True, slots=True)
class Words:
    """Folded words: ``paris``."""

    text: str


@dataclass(frozen=True, slots=True)
class Choice:
    """A letter of a multiple choice, and the text beside it."""

    letter: str
    rest: Answer | None = None


@dataclass(frozen=True, slots=True)
class Several:
    """Several answers: a tuple in ``( )``, a set in braces, a matrix of tuples, a list without brackets, or a data set's list
    of answers, not all of which may be needed (``listed``).
    """

    kind: Literal["tuple", "set", "matrix", "list", "listed"]
    items: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Interval:
    """``[left, right)``; one that is open at both ends may also be a ``Several`` of two."""

    left: Answer
    right: Answer
    left_closed: bool
    right_closed: bool


@dataclass(frozen=True, slots=True)
class Region:
    """A set of numbers with a name: ``reals``, ``empty``, ..."""

    name: str


@dataclass(frozen=True, slots=True)
class Relation:
    """``0 <= x < 1``: terms with a sign between each two, in LaTeX; a first term of ``None`` was left out."""

    terms: tuple[str | None, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Combined:
    """Regions or relations joined by ``or``, ``and`` or ``without``."""

    how: Literal["or", "and", "without"]
    parts: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Named:
    """``x = 5``: a value with its name; ``also`` has the values before it in a chain (``x = 3 + 2 = 5``)."""

    name: str
    value: Answer
    also: tuple[Answer, ...] = ()
    approximate: bool = False
    asked: bool = True
    """True if the name may be the thing that was asked for; not so in ``2x + 1 = 5``."""


@dataclass(frozen=True, slots=True)
class Doubtful:
    """A text that was not understood as a whole; ``core`` is the part that was."""

    text: str
    core: Answer | None = None
    denied: bool = False
    """True if its words take it back: "not 18"."""


Answer = (
    Number
    | Formula
    | Numeral
    | Moment
    | Ratio
    | Residue
    | Words
    | Choice
    | Several
    | Interval
    | Region
    | Relation
    | Combined
    | Named
    | Doubtful
)
