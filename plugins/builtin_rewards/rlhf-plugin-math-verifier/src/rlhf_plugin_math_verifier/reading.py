"""Reads an answer as a whole: every token of it belongs to a part that is understood, or the answer is ``Doubtful``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from rlhf_plugin_math_verifier import choices, vocabulary
from rlhf_plugin_math_verifier.answers import (
    Answer,
    Choice,
    Combined,
    Doubtful,
    Formula,
    Interval,
    Named,
    Number,
    Region,
    Relation,
    Residue,
    Several,
    Words,
)
from rlhf_plugin_math_verifier.decoration import tidy
from rlhf_plugin_math_verifier.formulas import formula, rational
from rlhf_plugin_math_verifier.moments import moment, numeral, ratio
from rlhf_plugin_math_verifier.quantities import clocked, compound, quantity
from rlhf_plugin_math_verifier.tokens import FUNCTIONS, Token, depth, enclosed, joined, split, tokens

Kind = Literal["tuple", "set", "matrix", "list"]
MAX_CHARS = 2000
"""Maximum characters: a longer text, or one with more tokens, is not an answer."""
MAX_DEPTH = 30
"""Maximum depth of brackets."""

_CONJUNCTIONS = {",": ",", ";": ",", "and": "and", r"\land": "and", "or": "or", r"\lor": "or"}
_CONJUNCTIONS |= dict.fromkeys(["和", "与", "與", "及", "且", "그리고", "と"], "and")
_CONJUNCTIONS |= dict.fromkeys(["或", "或者", "または", "又は", "또는", "หรือ"], "or")
_INEQUALITIES = frozenset(["<", ">", r"\le", r"\ge", r"\ne"])
_RELATIONS = _INEQUALITIES | {"=", r"\approx", r"\in"}
_UNKNOWN_RELATIONS = frozenset(
    str.split(
        r"\notin \equiv \sim \to \rightarrow \Rightarrow \implies \iff \Leftrightarrow \propto \perp \parallel \subset \subseteq"
        r" \supset \cong \neg \not \nmid \mid \mapsto"
    )
)
_REGIONS = {r"\reals": "reals", r"\integers": "integers", r"\naturals": "naturals", r"\rationals": "rationals"}
_REGIONS |= {r"\complexes": "complexes", r"\emptyset": "empty"}
_REGIONS_IN_WORDS = {
    "empty set": "empty",
    "all real numbers": "reals",
    "all reals": "reals",
    "real numbers": "reals",
    "any real number": "reals",
    "all integers": "integers",
}
_PLAIN = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,40})(?:\.[0-9]{1,40})?")
_PUNCTUATION = frozenset(".,;:")


def read(text: str, *, label: bool = False) -> Answer:
    """Returns the answer in a text. A ``label`` of a choice may have other letters in its text."""
    if len(text) > MAX_CHARS:
        return Doubtful("")
    text = tidy(text)
    if _PLAIN.fullmatch(text):  # most answers of arithmetic: the same, sooner
        return Number(Fraction(text.replace(",", "")))
    if (letter := choices.letter(text, label=label)) is not None:
        rest = choices.rest(text)
        return Choice(letter, read(rest) if rest else None)
    found = tokens(text)
    return Doubtful("") if len(found) > MAX_CHARS or depth(found) > MAX_DEPTH else _read(found)


_COMMA = re.compile(r"(-?[0-9]+),([0-9]+)(?![0-9,])([^,]*)")
_POINTS = re.compile(r"-?[0-9]{1,3}(?:\.[0-9]{3})+")
_BLANKS = re.compile(r"-?[0-9]+(?: [0-9]+)+")


def other_readings(text: str) -> list[Answer]:
    """Returns what else a text may be to other people: ``3,5`` is a number too, ``1.234`` may be 1234, ``1 2`` 12."""
    text = tidy(text)
    if match := _COMMA.fullmatch(text):
        return [read(f"{match[1]}.{match[2]}{match[3]}"), _read(tokens(text.replace(",", ", ")))]
    if text.startswith("- ") and _PLAIN.fullmatch(text[2:]):
        return [Number(Fraction(text[2:].replace(",", "")))]
    if _POINTS.fullmatch(text):
        return [Number(Fraction(text.replace(".", "")))]
    if _BLANKS.fullmatch(text):
        return [Number(Fraction(text.replace(" ", ""))), _read(tokens(text.replace(" ", ", ")))]
    return []


def _read(found: Sequence[Token]) -> Answer:
    found = _bare(found)
    if not found:
        return Doubtful("")
    if (congruence := _residue(found)) is not None:
        return congruence
    unknown = any(
        token.text in _UNKNOWN_RELATIONS and not (token.text == r"\to" and r"\lim" in {each.text for each in found})
        for token in found
    )
    if unknown and found[0].text != r"\{":
        return Doubtful(joined(found), denied=found[0].text in (r"\neg", r"\not"))
    for reader in (
        _words,
        moment,
        numeral,
        clocked,
        compound,
        _several,
        ratio,
        _combined,
        _relation,
        _bracketed,
        _plus_or_minus,
    ):
        answer = reader(found)
        if answer is not None:
            return answer
    return quantity(found)


def _residue(found: Sequence[Token]) -> Residue | None:
    r"""Reads ``x \equiv 2 \pmod 5``, ``2 \bmod 5`` at the end of a congruence, ``2 (mod 5)``."""
    texts = [token.text for token in found]
    sign = next((i for i, text in enumerate(texts) if text in (r"\pmod", "mod", r"\mod")), None)
    if sign is None or (texts[sign] != r"\pmod" and r"\equiv" not in texts and texts[sign - 1] != "("):
        return None
    modulus = rational([token for token in found[sign + 1 :] if token.text not in "{}()"])
    value = rational(split(_bare(found[: sign - 1 if texts[sign - 1] == "(" else sign]), {r"\equiv"})[0][-1])
    return None if modulus is None or value is None or modulus < 2 else Residue(value % modulus, modulus)


def _bare(found: Sequence[Token]) -> list[Token]:
    """Returns the answer without punctuation at the ends and braces around all of it."""
    found = list(found)
    while found:
        if found[-1].text in _PUNCTUATION and found[-1].kind == "sign":
            found.pop()
        elif found[0].text in _PUNCTUATION:
            found.pop(0)
        elif found[0].text == "{" and enclosed(found) and len(split(found[1:-1], {","})[0]) == 1:
            found = found[1:-1]
        else:
            break
    return found


def _words(found: Sequence[Token]) -> Answer | None:
    if any(token.kind != "word" and token.text not in ("-", "'", ".") for token in found):
        return None
    words = [token.text.casefold() for token in found if token.kind == "word"]
    if not words:
        return None
    if (number := vocabulary.counted(words)) is not None or (number := vocabulary.fraction(words)) is not None:
        return Number(number)
    if words[0] in ("negative", "minus") and (number := vocabulary.counted(words[1:])) is not None:
        return Number(-number)
    if vocabulary.counted(words[:1]) is not None:
        return None  # "three apples"
    kept = list(words)
    while len(kept) > 1 and (kept[0] in vocabulary.LEADS or kept[0] in ("on", "in", "at")):
        kept.pop(0)
    text = " ".join(kept)
    return Region(_REGIONS_IN_WORDS[text]) if text in _REGIONS_IN_WORDS else Words(text)


def _several(found: Sequence[Token]) -> Answer | None:
    """Returns parts side by side: "3, 4", "x = 1 or x = 2", "x > 1 and x < 2"."""
    parts, between = split(found, _CONJUNCTIONS)
    if not between:
        return None
    if any(token.kind == "word" for token in found) and [token.text for token in parts[-1]][:2] == ["a", "half"]:
        return None  # "5 and a half" is one number
    joint = {_CONJUNCTIONS[each] for each in between}
    if joint == {","} and any(token.text == r"\ne" for token in found):
        joint = {"and"}  # x > 2, x \ne 4
    items = _without_parameters([_named_part(part) or _read(part) for part in parts if part], parts)
    if len(items) == 1 and len(parts) > 1:
        return items[0]
    if len(items) < 2:
        return items[0] if items and len(parts) < 3 else Doubtful(joined(found))
    if any(isinstance(item, Relation) for item in items):
        conditions = [_condition(item) for item in items]
        if all(isinstance(item, Relation) for item in conditions) and (len(joint - {","}) == 1 or joint == {","}):
            kept = tuple(item for item in conditions if item is not None)
            return Combined("or" if "or" in joint else "and", kept) if joint != {","} else Several("list", kept)
        return Doubtful(joined(found))
    if any(isinstance(item, Interval) for item in items) and all(_is_interval(item) for item in items) and "or" in joint:
        return Combined("or", tuple(items))
    if any(isinstance(item, Words) for item in items) and not all(isinstance(item, Words) for item in items):
        understood = [item for item in items if not isinstance(item, Words)]
        return Doubtful(joined(found), understood[0] if len(understood) == 1 else None)
    if any(isinstance(item, Doubtful) for item in items):
        return Doubtful(joined(found))
    return Several("list", tuple(_solutions(_flat(items))))


def _named_part(part: Sequence[Token]) -> Named | None:
    """Reads "mean 5" and "Ann: 12": a name of plain words before a value."""
    count = next((i for i, token in enumerate(part) if token.kind != "word"), len(part))
    words = [token.text for token in part[:count]]
    if not 0 < count <= 3 or count == len(part) or part[count].text in _RELATIONS or any(map(vocabulary.changes, words)):
        return None
    folded = {word.casefold() for word in words}
    if vocabulary.denies(words) or folded & (vocabulary.GUESSES | vocabulary.BOUNDS) or folded <= vocabulary.LEADS:
        return None
    value = _read(part[count + 1 :] if part[count].text == ":" else part[count:])
    return Named(" ".join(words).casefold(), value) if isinstance(value, Number | Formula) else None


def _without_parameters(items: list[Answer], parts: Sequence[Sequence[Token]]) -> list[Answer]:
    r"""Returns the items without a last one that says what a letter stands for: ``2k\pi, k \in \integers``."""
    last = [token.text for token in parts[-1]]
    letter = last[0] if len(last) == 3 and last[1] == r"\in" and last[2] in _REGIONS else None
    used = letter is not None and any(token.text == letter for part in parts[:-1] for token in part)
    return items[:-1] if used and len(items) > 1 else items


def _flat(items: Sequence[Answer]) -> list[Answer]:
    r"""Returns the items of ``1 \pm \sqrt{2}, 3``: three."""
    out: list[Answer] = []
    for item in items:
        out += item.items if isinstance(item, Several) and item.kind == "list" else [item]
    return out


def _solutions(items: list[Answer]) -> list[Answer]:
    """Returns ``p=5, q=2, p=7, q=2`` as two tuples: the same names in the same order, several times."""
    names = [item.name for item in items if isinstance(item, Named)]
    size = len(set(names))
    times, over = divmod(len(items), size) if size > 1 else (0, 0)
    if len(names) != len(items) or times < 2 or over or names != names[:size] * times:
        return items
    return [Several("tuple", tuple(items[start : start + size])) for start in range(0, len(items), size)]


def _condition(item: Answer) -> Relation | None:
    if isinstance(item, Named) and isinstance(item.value, Number | Formula) and not item.also and not item.approximate:
        return Relation((item.name, latex_of(item.value)), ("=",))
    return item if isinstance(item, Relation) else None


def latex_of(value: Number | Formula) -> str:
    if isinstance(value, Formula):
        return value.latex
    return rf"\frac{{{value.value.numerator}}}{{{value.value.denominator}}}"


def _is_interval(item: Answer) -> bool:
    return isinstance(item, Interval) or (isinstance(item, Several) and item.kind == "tuple" and len(item.items) == 2)


def _combined(found: Sequence[Token]) -> Answer | None:
    how = {r"\cup": "or", r"\cap": "and", r"\setminus": "without"}
    for sign in how:
        parts, between = split(found, {sign})
        if between:
            return _joined_regions(found, parts, how[sign])
    if found[0].text in _REGIONS and len(found) > 2 and found[1].text in ("-", "/") and found[2].text == r"\{":
        return _joined_regions(found, [list(found[:1]), list(found[2:])], "without")
    return None


def _joined_regions(found: Sequence[Token], parts: Sequence[Sequence[Token]], how: str) -> Answer:
    items = [_read(part) for part in parts]
    if any(isinstance(item, Doubtful | Words) for item in items):
        return Doubtful(joined(found))
    if how == "or" and all(isinstance(item, Several) and item.kind == "set" for item in items):
        return Several("set", tuple(each for item in items if isinstance(item, Several) for each in item.items))
    return Combined(how, tuple(items))  # type: ignore[arg-type]


def _relation(found: Sequence[Token]) -> Answer | None:
    terms, signs = split(found, _RELATIONS)
    if not signs:
        return None
    if r"\in" in signs:
        if len(signs) > 1 or _name(terms[0]) is None:
            return Doubtful(joined(found))
        return _read(terms[1])
    if set(signs) & _INEQUALITIES:
        if r"\ne" in signs and len(terms) == 2 and (ends := split(terms[1], {r"\pm"}))[1]:  # x \ne \pm 1
            sides = [[*terms[0], Token("command", r"\ne"), *ends[0][0], Token("sign", sign), *ends[0][1]] for sign in "+-"]
            both = [_read(side) for side in sides]
            return Combined("and", tuple(both)) if all(isinstance(one, Relation) for one in both) else Doubtful(joined(found))
        latex = [formula(term) if term else None for term in terms]
        if any(each is None for each in latex[1:]) or (terms[0] and latex[0] is None) or r"\approx" in signs:
            return Doubtful(joined(found))
        return Relation(tuple(latex), tuple(signs))
    return _equation(found, terms, approximate=r"\approx" in signs)


def _equation(found: Sequence[Token], terms: list[list[Token]], *, approximate: bool) -> Answer:
    if not terms[0]:
        terms = terms[1:]
        if len(terms) == 1:
            value = _read(terms[0])
            return Doubtful(joined(found), value) if approximate and not isinstance(value, Doubtful) else value
    if not all(terms):
        return Doubtful(joined(found))
    if _name(terms[0]) is None and len(terms) == 2 and len(terms[1]) == 1 and terms[1][0].kind == "letter":
        terms = terms[::-1]  # 5 = x
    name = _name(terms[0])
    constant = name is None and not any(token.kind in ("letter", "word") for token in terms[0])
    values = [_read(term) for term in (terms if constant else terms[1:])]
    if isinstance(values[-1], Doubtful):
        core = values[-1].core
        return Doubtful(joined(found), core, denied=values[-1].denied)
    also = tuple(value for value in values[:-1] if not isinstance(value, Doubtful))
    asked = constant or name is not None or _of_letters(terms[0])
    return Named("" if constant else joined(terms[0]), values[-1], also, approximate, asked=asked)


def _of_letters(term: Sequence[Token]) -> bool:
    r"""Returns True for a thing that is asked for: ``\frac{AB}{CD}``, ``\sin A``, ``\frac{d}{dx}(x^3)``, ``\int_0^1 x``."""
    texts = [token.text for token in term]
    if texts[:1] and texts[0] in (r"\int", r"\lim", r"\sum", r"\prod", r"\iint", r"\oint"):
        return True
    if texts[:3] in ([r"\frac", "{", "d"], [r"\frac", "{", r"\partial"], [r"\dfrac", "{", "d"]):
        return True
    return texts[:1] != ["-"] and not any(token.kind == "number" for token in term)


def _name(term: Sequence[Token]) -> str | None:
    """Returns the name in an equation: ``x``, ``f(2)``, ``a_n``, ``x + y``, "Area"; None if it contains numbers that count."""
    depth, before = 0, ""
    if term and (term[0].text == "-" or any(token.text in FUNCTIONS or token.text in (r"\frac", r"\sqrt") for token in term)):
        return None
    for token in term:
        depth += (token.text in ("(", "{")) - (token.text in (")", "}"))
        if token.kind == "number" and depth == 0 and before not in ("^", "_"):
            return None
        before = token.text
    return joined(term) if term else None


def _bracketed(found: Sequence[Token]) -> Answer | None:
    first, last = found[0].text, found[-1].text
    if first.startswith(r"\begin{") and enclosed(found) and "matrix" in first and "vmatrix" not in first.lower():
        rows = [split(row, {"&"})[0] for row in split(found[1:-1], {r"\\"})[0] if row]
        return _of_items("matrix", found, [_sequence("tuple", found, row) for row in rows])
    if len(found) == 1 and first in _REGIONS:
        return Region(_REGIONS[first])
    if first == "]" and last == "[" and len(found) > 3:  # the French way to write (0, 1)
        found = [Token("sign", "("), *found[1:-1], Token("sign", ")")]
        first, last = "(", ")"
    if found[0].kind == "letter" and first.isupper() and enclosed(found[1:]) and split(found[2:-1], {","})[1]:
        return _bracketed(found[1:]) if found[1].text == "(" else None  # P(3, -2), a point
    if not enclosed(found):
        return None
    inside = list(found[1:-1])
    parts, between = split(inside, {",", ";"})
    if first == "[" and last == "]" and len(parts) == 1 and rational(inside) is not None:
        return _read(inside)
    if first in ("(", "[") and enclosed(inside) and inside[0].text.startswith(r"\begin{"):
        return _read(inside)
    if first in (r"\{", "{"):
        return _set(found, inside, parts)
    if first == r"\langle" or (first == "(" and last == ")"):
        if not between:
            return _read(inside) if first == "(" else None
        return _sequence("tuple", found, parts)
    nested = all(part[:1] and part[0].text == "[" for part in parts)
    if first in ("(", "[") and last in (")", "]") and len(parts) == 2 and not nested:
        ends = [_read(part) for part in parts]
        if all(isinstance(end, Number | Formula) for end in ends):
            return Interval(ends[0], ends[1], first == "[", last == "]")
    lines = [part for part in parts if part and part[0].text == "[" and enclosed(part)]
    if first == "[" and last == "]" and len(lines) == len(parts) > 1:
        return _of_items("matrix", found, [_sequence("tuple", found, split(line[1:-1], {",", ";"})[0]) for line in lines])
    if first == "[" and last == "]" and between:
        return _sequence("tuple", found, parts)
    return None


def _sequence(kind: Kind, found: Sequence[Token], parts: Sequence[Sequence[Token]]) -> Answer:
    return _of_items(kind, found, [_read(part) for part in parts])


def _of_items(kind: Kind, found: Sequence[Token], items: Sequence[Answer]) -> Answer:
    if not items or any(isinstance(item, Doubtful | Relation) for item in items):
        return Doubtful(joined(found))
    return Several(kind, tuple(_flat(items) if kind == "set" else items))


def _set(found: Sequence[Token], inside: Sequence[Token], parts: Sequence[Sequence[Token]]) -> Answer | None:
    if not inside:
        return Region("empty")
    for bar in (r"\mid", ":", "|"):
        sides, between = split(inside, {bar})
        if len(between) == 1 and any(token.text in _RELATIONS for token in sides[1]):
            named = _name(split(sides[0], {r"\in"})[0][0])
            return _read(sides[1]) if named else Doubtful(joined(found))
    if found[0].text == "{" and len(parts) == 1:
        return None
    return _sequence("set", found, parts)


def _plus_or_minus(found: Sequence[Token]) -> Answer | None:
    r"""Returns the two answers of ``1 \pm \sqrt{2}``."""
    if [token.text for token in found].count(r"\pm") != 1:
        return None
    both = [
        quantity([Token("sign", sign, token.spaced) if token.text == r"\pm" else token for token in found]) for sign in "+-"
    ]
    return Doubtful(joined(found)) if any(isinstance(item, Doubtful) for item in both) else Several("list", tuple(both))
