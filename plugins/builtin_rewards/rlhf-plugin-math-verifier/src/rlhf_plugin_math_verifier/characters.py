"""Normalisation of characters: digits and signs of other scripts, minus signs, mathematical symbols, repeating decimals."""

from __future__ import annotations

import re
import unicodedata

_MINUS = "−–‐‑‒﹣"
_FOLDED: dict[int, str | None] = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
_FOLDED |= {ord(sign): "-" for sign in _MINUS} | {ord(blank): " " for blank in "\u00a0\u2002\u2003\u2009\u200a\u202f\u3000"}
_FOLDED |= {ord(mark): None for mark in "\u200b\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060\ufeff"}
_FOLDED |= {ord("’"): "'", ord("‘"): "'", ord("“"): '"', ord("”"): '"', ord("｡"): "。", ord("､"): "、"}
_FOLDED |= {ord("⟹"): "⇒"}
_FOLDED |= {ord(quote): " " for quote in "「」『』【】《》〈〉«»"}
_RUNNING_ON = re.compile(r"(?<=[0-9])(?:\.{2,}|…)")
_FEET = re.compile(r"(?<![\w.'])([0-9]{1,2})\s?'\s?([0-9]{1,2})\s?(?:\"|'')(?![\w'])")
_HOURS = re.compile(r"(?<![\w.])([0-9]{1,3})\s?h\s?([0-9]{1,2})\s?m(?:in)?(?![\w/])")
_SIGN_MARKS = ("+-", "+/-", "lus or", "lus-", "itive or", "ative or")
_WORDED_SIGN = re.compile(
    r"\b(?:plus[ -]or[ -]minus|plus-minus|(?:positive|negative) or (?:negative|positive))(?=\s{0,3}[$\\\d])"
    r"|(?<![\w)])\+/?-(?=\s?\d)",
    re.IGNORECASE,
)
_OTHER = re.compile(r"[^\x00-\x7f]")

_SYMBOLS = {
    "×": r"\times ",
    "✕": r"\times ",
    "⋅": r"\cdot ",
    "·": r"\cdot ",
    "∙": r"\cdot ",
    "÷": "/",
    "∕": "/",
    "⁄": "/",
    "√": r"\sqrt ",
    "∞": r"\infty ",
    "≤": r"\le ",
    "⩽": r"\le ",
    "≦": r"\le ",
    "≥": r"\ge ",
    "⩾": r"\ge ",
    "≧": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "≃": r"\approx ",
    "≅": r"\approx ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "∖": r"\setminus ",
    "∅": r"\emptyset ",
    "⌀": r"\emptyset ",
    "ℝ": r"\reals ",
    "ℤ": r"\integers ",
    "ℕ": r"\naturals ",
    "ℚ": r"\rationals ",
    "ℂ": r"\complexes ",
    "±": r"\pm ",
    "°": r"^\circ ",
    "º": r"^\circ ",
    "℃": r"^\circ C",
    "℉": r"^\circ F",
    "′": "'",
    "″": "''",
    "…": r"\ldots ",
    "∨": r"\lor ",
    "∧": r"\land ",
    "¬": r"\neg ",
    "—": "-",
    "⟨": r"\langle ",
    "⟩": r"\rangle ",
    "∣": "|",
    "⌊": r"\lfloor ",
    "⌋": r"\rfloor ",
    "⌈": r"\lceil ",
    "⌉": r"\rceil ",
    "、": ",",
    "。": ".",
    "∠": r"\angle ",
    "△": r"\triangle ",
    "ⅇ": "e",
    "ⅈ": "i",
    "𝑒": "e",
    "𝑖": "i",
}
_GREEK = dict(
    zip(
        "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩϵϑϕµ",
        str.split(
            "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi chi psi omega "
            "Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega epsilon theta phi mu"
        ),
        strict=True,
    )
)
_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹ⁿ", "0123456789n", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_RAISED = re.compile(rf"⁻?[{''.join(_SUPERSCRIPTS)}]+|[{''.join(_SUBSCRIPTS)}]+")

_ROOF = r"\\(?:overline|bar|widebar|dot|overset\{\\frown\})\s*"
_REPEATING = re.compile(
    rf"(?<![0-9])(?P<whole>[0-9]*)\.(?P<fixed>[0-9]*)"
    rf"(?:\\dot\s*\{{?(?P<first>[0-9])\}}?(?P<inner>[0-9]*)\\dot\s*\{{?(?P<last>[0-9])\}}?|{_ROOF}\{{\s*(?P<roof>[0-9]+)\s*\}}"
    rf"|{_ROOF}(?P<digit>[0-9])|\((?P<bracket>[0-9]+)\))(?![0-9])"
)
_RUNNING = re.compile(r"(?<![0-9])([0-9]*)\.([0-9]{2,})(?:\.{3}|\\[lc]?dots(?![a-z]))")
_MAX_FIXED, _MAX_PERIOD = 8, 30
_TIMES = re.compile(r"(?<=[0-9])(?:\s*[xX]\s*(?=10\s*\^)|\s+[xX]\s+(?=[$(]?[0-9])|(?<![0-9]0)[xX](?=[0-9]))")


def fold(text: str) -> str:
    """Converts digits, Latin letters and signs of full width or of other scripts to ASCII, all minus signs to one, and removes
    invisible characters.
    """
    if "'" in text and _FEET.search(text):
        text = _FEET.sub(r"\1 ft \2 in", text)
    if any(mark in text for mark in _SIGN_MARKS):
        text = _WORDED_SIGN.sub("±", text)
    text = _HOURS.sub(r"\1 h \2 min", text)
    text = _TIMES.sub(r" \\times ", _RUNNING_ON.sub(r"\\ldots ", text))
    if text.isascii():
        return text
    return _OTHER.sub(_folded_digit, text.translate(_FOLDED))


def _folded_digit(match: re.Match[str]) -> str:
    digit = unicodedata.decimal(match.group(), None)
    return match.group() if digit is None else str(digit)


def as_latex(text: str) -> str:
    """Returns a folded answer with its symbols as LaTeX: ``≤``, ``π``, ``x²``, ``½``, ``∪``."""
    if text.isascii():
        return text
    return _OTHER.sub(_symbol, _RAISED.sub(_raised, text))


def _raised(match: re.Match[str]) -> str:
    found = match.group()
    if found[0] in _SUBSCRIPTS:
        return "_{" + "".join(map(_SUBSCRIPTS.__getitem__, found)) + "}"
    return "^{" + found.replace("⁻", "-").translate({ord(key): value for key, value in _SUPERSCRIPTS.items()}) + "}"


def _symbol(match: re.Match[str]) -> str:
    character = match.group()
    if character in _SYMBOLS:
        return _SYMBOLS[character]
    if character in _GREEK:
        return f"\\{_GREEK[character]} "
    top, slash, bottom = unicodedata.normalize("NFKC", character).partition("⁄")
    return rf"\frac{{{top}}}{{{bottom}}}" if slash else character


def without_repetition(text: str) -> str:
    r"""Converts repeating decimals to fractions: ``0.\overline{3}``, ``0.\dot{1}4285\dot{7}``, ``0.(3)``, ``0.333...``,
    ``0.1818...``.
    """
    if "." not in text:
        return text
    return _RUNNING.sub(_running, _REPEATING.sub(_repeating, text))


def _running(match: re.Match[str]) -> str:
    """Converts ``0.1818...``: digits that repeat at least three times, or twice if they are two or three."""
    digits = match[2]
    for fixed in range(min(_MAX_FIXED, len(digits))):
        rest = digits[fixed:]
        for period in range(1, min(_MAX_PERIOD, len(rest) // 2) + 1):
            times, left = divmod(len(rest), period)
            if not left and (times > 2 or 1 < period < 4) and rest == rest[:period] * times:
                return _fraction(match[1], digits[:fixed], rest[:period])
    return match.group()


def _repeating(match: re.Match[str]) -> str:
    parts = match.groupdict(default="")
    inner = parts["first"] + parts["inner"] + parts["last"]
    return _fraction(parts["whole"], parts["fixed"], parts["roof"] or inner or parts["digit"] or parts["bracket"])


def _fraction(whole: str, fixed: str, repeated: str) -> str:
    every, before = int(whole + fixed + repeated), int(whole + fixed or "0")
    return rf"\frac{{{every - before}}}{{{'9' * len(repeated) + '0' * len(fixed)}}}"
