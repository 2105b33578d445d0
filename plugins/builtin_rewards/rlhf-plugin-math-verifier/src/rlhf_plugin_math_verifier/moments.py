"""Dates, times of day, ratios and numerals with a base, which a parser of formulas would compute."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from rlhf_plugin_math_verifier.answers import Moment, Numeral, Ratio
from rlhf_plugin_math_verifier.formulas import rational
from rlhf_plugin_math_verifier.tokens import Token, split
from rlhf_plugin_math_verifier.vocabulary import counted

_MONTHS = str.split("january february march april may june july august september october november december")
_MONTH = {name[:length]: number for number, name in enumerate(_MONTHS, 1) for length in (3, len(name))} | {"sept": 9}
_BESIDE_DATES = frozenset(["th", "st", "nd", "rd", "of", "on", "the"])
_DATE = re.compile(r"(?P<first>[0-9]{1,4})(?P<sign>[-/.])(?P<middle>[0-9]{1,2})(?P=sign)(?P<last>[0-9]{1,4})")
_CLOCK = re.compile(r"(?P<hour>[0-9]{1,2})(?::(?P<minute>[0-9]{2})(?::(?P<second>[0-9]{2}))?)?(?P<half>[ap]m)")
_BASE = re.compile(
    r"\(?(?P<digits>[0-9A-Za-z]+)\)?(?:_(?:\{(?:base)?(?P<base>[0-9]{1,2}|[a-z]+)\}|(?P<digit>[0-9]{1,2})|\{\((?P<bracket>[0-9]{1,2})\)\})"
    r"|\(?base(?P<said>[0-9]{1,2}|[a-z]+)\)?)"
)


def moment(found: Sequence[Token]) -> Moment | None:
    """Reads ``2024-05-06``, ``6/5/2024``, ``May 6, 2024``, ``9:30 a.m.``, ``3 pm``."""
    if len(found) > 8 or not any(token.kind == "number" for token in found):
        return None
    plain = "".join(token.text.casefold() for token in found)
    if match := _CLOCK.fullmatch(plain):
        hour, minute, second = (int(match[name] or 0) for name in ("hour", "minute", "second"))
        if 1 <= hour <= 12 and minute < 60 and second < 60:
            return Moment(
                minutes=hour % 12 * 60 + minute + Fraction(second, 60) + 720 * (match["half"] == "pm"), half=match["half"]
            )
    if match := _DATE.fullmatch(plain):
        return _date(match["first"], match["middle"], match["last"], match["sign"])
    return _date_in_words(found)


def _date(first: str, middle: str, last: str, sign: str) -> Moment | None:
    if len(first) == 4 and len(last) < 3 and sign != "." and 1 <= int(middle) <= 12 and 1 <= int(last) <= 31:
        return Moment(date=(int(first), int(middle), int(last)))
    a, b, year = int(first), int(middle), int(last)
    if len(last) != 4 or not (1 <= min(a, b) <= 12 and max(a, b) <= 31):
        return None
    return Moment(date=(year, min(a, b), max(a, b)) if max(a, b) > 12 else f"{a}/{b}/{year}")


def _date_in_words(found: Sequence[Token]) -> Moment | None:
    words = [token.text.casefold() for token in found if token.kind == "word" and token.text not in _BESIDE_DATES]
    numbers = [token.text for token in found if token.kind == "number"]
    others = [token for token in found if token.kind not in ("word", "number") and token.text not in (",", ".")]
    if len(words) != 1 or words[0] not in _MONTH or others or not 1 <= len(numbers) <= 2 or not all(map(str.isdigit, numbers)):
        return None
    day, year = int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else None
    if not 1 <= day <= 31 or (year is not None and year < 32):
        return None
    return Moment(date=(year, _MONTH[words[0]], day))


def ratio(found: Sequence[Token]) -> Ratio | None:
    """Reads ``2:1``, ``10:30``, ``1:2:3``."""
    parts, between = split(found, {":"})
    if len(found) > 2 and not between:
        parts, between = split(found, {"to"})
    values = [rational(part) for part in parts]
    if not between or any(value is None for value in values):
        return None
    clock = len(parts[1]) == 1 and len(parts[1][0].text) == 2 and parts[1][0].text < "60"
    return Ratio(tuple(value for value in values if value is not None), clock)


def numeral(found: Sequence[Token]) -> Numeral | None:
    r"""Reads ``101_2``, ``1A_{16}``, ``212_{\text{five}}``, ``110 base 2``."""
    if not any(token.text == "_" or token.text.casefold() == "base" for token in found):
        return None
    match = _BASE.fullmatch("".join(token.text for token in found))
    if match is None or not match["digits"][0].isalnum() or not any(token.kind == "number" for token in found[:-1]):
        return None
    written = match["base"] or match["digit"] or match["bracket"] or match["said"]
    base = int(written) if written.isdigit() else counted([written])
    if base is None or not 2 <= base <= 36:
        return None
    digits = match["digits"].casefold()
    try:
        int(digits, int(base))
    except ValueError:
        return None
    return Numeral(digits.lstrip("0") or "0", int(base))
