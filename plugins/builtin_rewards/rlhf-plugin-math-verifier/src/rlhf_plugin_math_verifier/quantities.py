"""Numbers and formulas with the words around them: each word is a sign, a multiplier, a unit or a noun, or the whole is
doubtful.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from rlhf_plugin_math_verifier import units, vocabulary
from rlhf_plugin_math_verifier.answers import Answer, Doubtful, Formula, Number
from rlhf_plugin_math_verifier.formulas import formula, rational
from rlhf_plugin_math_verifier.tokens import CLOSING, FUNCTIONS, OPENING, Token, joined, tokens

MAX_WORDS = 8
"""Maximum words beside a number; more words are a sentence with an unknown meaning."""
_CURRENCY = {"$": "$", "€": "€", "£": "£", "¥": "¥", "￥": "¥", "₹": "₹", "₩": "₩"}


def quantity(found: Sequence[Token]) -> Answer:
    """Returns a number or a formula with the words beside it."""
    text = joined(found)
    if sum(token.kind == "word" for token in found) > 2 * MAX_WORDS:
        return Doubtful(text)
    body, before = _without_leads(_with_signs(found))
    if not body:
        return Doubtful(text)
    body, currency = _without_currency(body)
    value, rest = _value(body)
    if value is None:
        return Doubtful(text)
    value, rest = _multiplied(value, rest)
    doubtful = [token.text for token in before if token.text.casefold() not in vocabulary.LEADS]
    words = [token.text for token in rest if token.kind == "word"]
    unit = _unit(rest, value.unit or currency)
    if doubtful or unit is None or _alters(words):
        folded = {word.casefold() for word in doubtful if not vocabulary.is_script(word)} - vocabulary.GUESSES
        bound = bool(folded & vocabulary.BOUNDS) or any(map(vocabulary.changes, folded))
        return Doubtful(text, value, denied=bound or vocabulary.denies(doubtful) or vocabulary.denies(_predicate(words)))
    return replace(value, unit=unit if unit.dimensions or unit.words else None)


def compound(found: Sequence[Token]) -> Number | None:
    """Reads "2 hours 30 minutes", "7 dollars and 50 cents", "5 ft 3 in": parts of one dimension, each smaller."""
    starts = [
        i
        for i, token in enumerate(found)
        if token.kind == "number" and (i == 0 or found[i - 1].kind != "sign" or found[i - 1].text in ",$")
    ]
    if (
        len(starts) < 2
        or sum(token.kind == "number" for token in found) != len(starts)
        or any(token.text == "," for token in found[:2])
    ):
        return None
    starts = [i - 1 if i and found[i - 1].text in _CURRENCY else i for i in starts]
    if starts[0]:
        return None
    total, first, smallest = Fraction(0), units.Unit(), None
    for start, end in zip(starts, [*starts[1:], len(found)], strict=True):
        part = list(found[start:end])
        while part and part[-1].text in ("and", ","):
            part.pop()
        value = quantity(part)
        if not isinstance(value, Number) or value.unit is None or not value.unit.dimensions or value.unit.words:
            return None
        first = first if smallest is not None else value.unit
        if value.unit.dimensions != first.dimensions or (smallest is not None and value.unit.factor >= smallest):
            return None
        smallest = value.unit.factor
        total += value.value * value.unit.factor / first.factor
    return Number(total, first)


def clocked(found: Sequence[Token]) -> Number | None:
    """Reads "1:30 hours" and "2:15 min": the unit is that of the first number, and each further number counts its sixtieths."""
    count = next((i for i, token in enumerate(found) if token.kind != "number" and token.text != ":"), len(found))
    numbers = [token.text for token in found[:count:2]]
    if count not in (3, 5) or not all(map(str.isdecimal, numbers)) or any(token.text != ":" for token in found[1:count:2]):
        return None
    value = quantity([found[0], *found[count:]])
    unit = value.unit if isinstance(value, Number) else None
    if unit is None or unit.dimensions != (("time", 1),) or unit.factor not in ((3600, 60) if len(numbers) == 2 else (3600,)):
        return None
    if any(len(number) != 2 or number > "59" for number in numbers[1:]):
        return None
    return Number(sum((Fraction(int(number), 60**place) for place, number in enumerate(numbers)), Fraction(0)), unit)


def _with_signs(found: Sequence[Token]) -> list[Token]:
    """Replaces words for a sign by the sign: "5 plus 1", "7 squared", "negative 5", "divided by", "and a half"."""
    out: list[Token] = []
    texts = [token.text.casefold() if token.kind in ("word", "letter") else "" for token in found]
    skip = 0
    for position, token in enumerate(found):
        if skip:
            skip -= 1
            continue
        word, after = texts[position], found[position + 1 : position + 2]
        math_before = bool(out) and out[-1].kind != "word"
        math_after = bool(after) and after[0].kind != "word"
        if (word == "divided" and texts[position + 1 : position + 2] == ["by"]) or (
            word == "out" and texts[position + 1 : position + 2] == ["of"] and math_before
        ):
            out.append(Token("sign", "/"))
            skip = 1
        elif word == "and" and texts[position + 1 : position + 3] == ["a", "half"]:
            out += tokens(r"+\frac12")
            skip = 2
        elif (
            (word in ("factorial", "percent", "pct") and math_before)
            or (word in ("squared", "cubed") and math_before and not (after and after[0].kind == "word"))
            or (word in ("plus", "times", "over") and math_before and math_after)
            or (word in ("minus", "negative") and math_after)
        ):
            out += tokens(vocabulary.OPERATORS[word])
        else:
            out.append(token)
    return out


def _without_leads(found: list[Token]) -> tuple[list[Token], list[Token]]:
    """Returns the text after the leading words, and these words; a number that they spell stays."""
    count = next((i for i, token in enumerate(found) if token.kind != "word"), len(found))
    for start in range(count):
        for end in range(count, start, -1):
            words = [token.text for token in found[start:end]]
            value = vocabulary.counted(words)
            if value is None and len(words) > 1:
                value = vocabulary.fraction(words)
            if value is not None:
                return [Token("number", str(value)), *found[end:]], found[:start]
    if count and count < len(found) and found[count].text == ":":
        return found[count + 1 :], found[:count]
    return found[count:], found[:count]


def _without_currency(found: list[Token]) -> tuple[list[Token], units.Unit | None]:
    for position in (0, 1):
        if len(found) > position + 1 and found[position].text in _CURRENCY and (position == 0 or found[0].text in "+-"):
            return found[:position] + found[position + 1 :], units.unit([_CURRENCY[found[position].text]])
    return found, None


def _value(found: list[Token]) -> tuple[Number | Formula | None, list[Token]]:
    """Returns the mathematics at the start, and the words or units after it."""
    for end in _ends(found):
        head, rest = found[:end], found[end:]
        degrees = len(head) > 2 and head[-1].text == r"\circ" and not any(token.text in FUNCTIONS for token in head)
        if degrees:
            head = head[:-2]
        if head and head[-1].text == "%":
            head, rest = head[:-1], [head[-1], *rest]
        unit = units.DEGREE if degrees else None
        if (number := rational(head)) is not None:
            return Number(number, unit), rest
        if (latex := formula(head)) is not None:
            return Formula(latex, unit), rest
    return None, found


def _ends(found: list[Token]) -> list[int]:
    """Returns places where the mathematics may end: at the first word, sign of a unit, or unit of one letter."""
    depth = 0
    for position, token in enumerate(found):
        last = found[position - 1] if position else None
        if depth == 0 and last is not None:
            single = token.kind == "letter" and token.text in units.SINGLE_LETTERS and token.spaced and last.text not in "+-/^_"
            if single and (units.unit([each.text for each in found[position:]]) or last.kind == "number"):
                return [position, len(found)]
            degrees = last.text == r"\circ" and (token.text in "CF" or token.kind == "number")
            if token.kind == "word" or token.text in _CURRENCY or token.text == "%" or degrees:
                return [position]
            if token.text in ("(", "/", "-") and [each.kind for each in found[position + 1 : position + 2]] == ["word"]:
                return [position]  # "5 (cm)", "$5/hour", "5-liter"
        depth += (token.text in OPENING) - (token.text in CLOSING)
    return [len(found)]


def _multiplied(value: Number | Formula, rest: list[Token]) -> tuple[Number | Formula, list[Token]]:
    """Applies multipliers: "5 million", "3 dozen eggs", "5 tenths", 3万."""
    while rest and rest[0].kind == "word":
        word = rest[0].text
        inside = word if vocabulary.is_script(word) else ""
        if inside and (factor := vocabulary.multiplier(inside[0])) and len(inside) > 1:
            rest = [rest[0], rest[0]._replace(text=inside[1:]), *rest[1:]]
        else:
            factor = vocabulary.multiplier(word)
        part = None if factor or not word.endswith("s") else vocabulary.part(word)
        if not factor and not part:
            break
        value = scaled(value, Fraction(factor) if factor else Fraction(1, part or 1))
        if word.casefold() in ("dozen", "dozens"):
            value = replace(value, dozens=True)
        rest = rest[1:]
    return value, rest


def scaled(value: Number | Formula, factor: Fraction) -> Number | Formula:
    if isinstance(value, Number):
        return replace(value, value=value.value * factor)
    return replace(value, latex=rf"({value.latex})\cdot\frac{{{factor.numerator}}}{{{factor.denominator}}}")


def _unit(rest: Sequence[Token], before: units.Unit | None) -> units.Unit | None:
    """Returns the unit that the whole rest is, or else the earlier one; None if the rest is something else."""
    texts: list[str] = []
    tail = list(rest)
    while tail:
        token = tail.pop(0)
        if token.text == "^":
            if [each.text for each in tail[:2]] == ["{", "-"]:
                tail = [tail[0], tail[2]._replace(text="-" + tail[2].text), *tail[3:]]
            raised = [each.text for each in tail[:3]]
            power = raised[1] if raised[0:1] == ["{"] and raised[2:] == ["}"] else raised[0] if raised else ""
            if power not in ("2", "3", "-1", "-2", "-3"):
                return None
            texts.append("^" + power)
            tail = tail[3:] if raised[0] == "{" else tail[1:]
        elif token.text not in (".", "'") and (texts or token.text != "-"):  # "sq. units", "3 hours' work", "5-liter"
            texts.append(_CURRENCY.get(token.text, token.text))
    if texts and texts[-1] in (r"\cdot", "/", "per"):
        return None
    if before == units.DEGREE and texts in (["C"], ["F"]):
        return replace(units.DEGREE, words=frozenset(texts))
    found = units.unit(texts)
    return (before or found) if found == units.Unit() else found


def _predicate(words: Sequence[str]) -> Sequence[str]:
    """Returns the words that are about the number itself: "is wrong", but not "students don't swim"."""
    if words[:1] and words[0].casefold() in ("is", "are", "was"):
        return words[1:]
    return [word for i, word in enumerate(words) if i == 0 or vocabulary.is_script(word)]


def _alters(words: Sequence[str]) -> bool:
    folded = [word.casefold() for word in words]
    if folded[:1] in (["th"], ["st"], ["nd"], ["rd"]) and folded[1:]:
        return True  # "the 5th prime"
    if any(len(word) > 1 and word[1:] != word[1:].lower() and not units.known(word) for word in words):
        return True  # "30 XYZ" may be a unit, or letters that are multiplied
    if "times" in folded and vocabulary.BOUNDS & set(folded):
        return True
    kept = [word for i, word in enumerate(words) if not (word.casefold() == "over" and i and words[i - 1].casefold() == "left")]
    return len(kept) > MAX_WORDS or any(map(vocabulary.changes, kept)) or vocabulary.denies(kept)
