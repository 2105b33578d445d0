"""Plain answers, compared here without a computer algebra system: numbers and words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_PLAIN_CHARS = 120
"""Longer is not plain, so that the work below stays small whatever a model writes."""

_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"))
_SPACING = re.compile(r"\\[!,;: ]|\{(,)\}|~|\\(?:left|right|displaystyle)\b")
_FRAC = re.compile(r"([0-9]?)\s*\\[dtc]?frac\s*(?:\{\s*(-?[0-9,]+)\s*\}\s*\{\s*([0-9,]+)\s*\}|([0-9])\s*([0-9]))")
_WRAPPED = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")

_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_TEN = r"(?:\\times|\\cdot|×|\*)\s*10\s*(?:\^|\*\*)\s*\{?\s*(?P<ten>[+-]?[0-9]{1,2})\s*\}?"
_CURRENCY = r"(?:\\?[$€£¥₹]\s*)?"
_NUMBER = re.compile(
    rf"{_CURRENCY}(?P<sign>[+-]?)\s*{_CURRENCY}"
    rf"(?:(?:(?P<mixed>[0-9]+)\s+)?(?P<top>{_WHOLE})\s*/\s*(?P<bottom>{_WHOLE})"
    rf"|(?P<whole>{_WHOLE})?(?P<point>\.[0-9]*)?(?:[eE](?P<exponent>[+-]?[0-9]{{1,2}})|\s*{_TEN})?)"
    r"(?P<tail>(?![0-9.,]).*)",
    re.DOTALL,
)
_PERCENT = re.compile(r"\s*(?:\\?%|per\s?cent)", re.IGNORECASE)
_UNIT_WORD = r"(?:[A-Za-z]{3,}|[ckm]?m|[km]?g|m?[lL]|lb|oz|ft|in|mi|yd|hr?|s|of)(?:\s*\^?\s*\{?[23]\}?|[²³])?"
_UNIT = re.compile(
    r"\s*(?:\^\s*\{?\\circ\}?|°|€|£|¥)\s*[CF]?"
    rf"|(?:\s*(?:[ckm]m|[km]g|mL|ft|lb|oz)|\s+{_UNIT_WORD})(?:(?:\s+|\s*/\s*){_UNIT_WORD}){{0,3}}"
)
# Words that change the number they follow, take it back, or go on to another.
_NOT_A_UNIT = re.compile(
    r"\b(?:(?:hundred|thousand|[a-z]+illion|lakh|lac|crore|grand|score|gross|dozen|pair)s?"
    r"|(?:third|quarter|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|\w+teen|\w+tie|hundred|thousand|\w+illion)th)s?"
    r"|half|halves|squared|cubed|factorial|plus|minus|times|over|divided|and|but|not|mod|per\s*cent|sin|cos|tan|log|exp|sqrt|root"
    r"|more|less|fewer|except|without|(?:wrong|incorrect)(?!\s+\w)|two|three|four|five|six|seven|eight|nine|ten)\b",
    re.IGNORECASE,
)
_WORDS = re.compile(r"[^\W\d_]+(?:[ '\-]+[^\W\d_]+)*")
_CHOICE = re.compile(r"\(?\s*([A-J])\s*(?:[).:](.*))?", re.DOTALL)
_OTHER_CHOICE = re.compile(
    r"(?<![\w\\])(?<!\w\()([A-HJ](?![\w=]|-\w| =)|I(?=[):]))"  # not P(B), F = ma, B-cells, "I think so"
    r"|(?:^\(?|\s\(?)([a-j])[).:;](?!\w)"
)
"""Any letter of a choice that stands alone in upper case, or before ``) . : ;``, is another choice, but for ``_NAMED``."""
_NAMED = re.compile(
    r"^\W*A (?!(?:is|or|and)\b)[a-z]"
    r"|(?<!\w)(?:[A-J](?:, ?[A-J])*,? (?:and|nor)|[Ee]ither [A-J] or) [A-J](?!\w)"
    r"|\b(?i:vitamins?|hepatitis|types?|group|grade|class|plan|points?|angle|side|sets?|events?) [A-J](?![\w).:]| and )"
    r"|(?:[0-9°]|\\circ\}?\$?)\s*[ACFGHJ](?![\w).:;])"
)
"""What a choice's own text has letters for: "A dog", "both A and B", "either A or B", "vitamin C", ``25 °C``, ``5 J``."""
_NAMES = "sin cos tan sec csc cot log exp sqrt mod gcd lcm max min and infinity infty"
_LETTERS = "alpha beta gamma delta epsilon theta lambda sigma phi psi omega"
MATHEMATICAL_WORDS = frozenset(f"{_NAMES} {_LETTERS}".split())
"""Words of three letters or more that formulas are made of."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it was written: ``50%`` is 50 and ``percent``."""

    value: Fraction
    percent: bool = False


def tidy(text: str) -> str:
    """The answer without delimiters, LaTeX spacing, emphasis and closing punctuation."""
    text = _SPACING.sub(r"\1", text.replace("−", "-"))
    previous = None
    while text != previous:
        previous = text
        text = text.strip().rstrip(".,;:").strip()
        for left, right in _DELIMITERS:
            if len(text) > len(left + right) and text.startswith(left) and text.endswith(right):
                text = text[len(left) : -len(right)]
    return text


def number(text: str) -> Number | None:
    """``-1,234.50``, ``$72``, ``3/4``, ``1\\frac{1}{2}``, ``50\\%``, ``1.5\\times10^3``, ``72 \\text{ km}``: units are dropped.

    ``None`` for whatever is not one number.
    """
    if len(text) > MAX_PLAIN_CHARS:
        return None
    text = _WRAPPED.sub(r" \1", _FRAC.sub(_inline_fraction, tidy(text))).strip()
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    parts = match.groupdict()
    percent = _PERCENT.match(parts["tail"])
    unit = parts["tail"][percent.end() :] if percent else parts["tail"]
    if unit and (not _UNIT.fullmatch(unit) or _NOT_A_UNIT.search(unit)):
        return None
    sign = -1 if parts["sign"] == "-" else 1
    if parts["top"]:
        mixed, top, bottom = (int((parts[name] or "0").replace(",", "")) for name in ("mixed", "top", "bottom"))
        if bottom == 0 or (parts["mixed"] and top >= bottom):
            return None
        return Number(sign * (mixed + Fraction(top, bottom)), percent is not None)
    digits = (parts["whole"] or "").replace(",", "") + (parts["point"] or "")
    if not digits.strip("."):
        return None
    exponent = int(parts["exponent"] or parts["ten"] or 0)
    value = Fraction("0" + digits.rstrip(".")) * Fraction(10) ** exponent
    return Number(sign * value, percent is not None)


def _inline_fraction(match: re.Match[str]) -> str:
    before, top, bottom, top_digit, bottom_digit = match.groups()
    return f"{before} {top or top_digit}/{bottom or bottom_digit}" if before else f"{top or top_digit}/{bottom or bottom_digit}"


def same(label: Number, answer: Number, decimals: int) -> bool:
    """Equal, or nearer than half a unit of the last of ``decimals`` places (labels below that compare exactly).

    A percentage equals its number both ways round (50% is 50, as labels have it, and 0.5), but never another percentage.
    """
    if label.percent == answer.percent:
        return _close(label, answer.value, decimals)
    if answer.percent:
        return _close(label, answer.value, decimals) or _close(label, answer.value / 100, decimals)
    return _close(label, answer.value, decimals) or _close(label, answer.value * 100, decimals)


def _close(label: Number, value: Fraction, decimals: int) -> bool:
    if label.value == value:
        return True
    tolerance = Fraction(1, 2 * 10**decimals)
    return abs(label.value) > tolerance and abs(label.value - value) <= tolerance


def words(text: str, *, label: bool = False) -> str | None:
    """The answer as folded words (``Paris``, ``\\text{yes}``) or as a choice (``(B) 12``: b); ``None``: it is mathematics.

    A choice that names another one beside it is none; in a ``label`` what follows the first is the choice's own text.
    """
    if len(text) > MAX_PLAIN_CHARS:
        return None
    text = tidy(_WRAPPED.sub(r" \1", tidy(text)))
    choice = _CHOICE.fullmatch(text)
    if choice:
        own = choice.group(1).casefold()
        rest = _NAMED.sub(" ", choice.group(2) or "")
        hedged = not label and any(other[other.lastindex or 0].casefold() != own for other in _OTHER_CHOICE.finditer(rest))
        return None if hedged else own
    if not _WORDS.fullmatch(text):
        return None
    folded = " ".join(text.casefold().split())
    if folded == "no" or any(len(word) > 2 and word not in MATHEMATICAL_WORDS for word in folded.split()):
        return folded
    return None
