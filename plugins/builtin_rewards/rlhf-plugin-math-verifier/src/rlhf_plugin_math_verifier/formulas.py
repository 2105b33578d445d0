"""Expressions without words: rational numbers are computed here, the rest becomes LaTeX of which every token is known."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from rlhf_plugin_math_verifier.tokens import CLOSING, FUNCTIONS, OPENING, Token, joined

_DECIMAL = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
_EXPONENT = r"(?:\{[+-]?[0-9]{1,3}\}|[0-9]{1,3})"
_RATIONAL = re.compile(
    rf"(?P<sign>[+-]?)(?:\((?P<inner>[+-]?{_DECIMAL})\)"
    rf"|(?:(?P<whole>[0-9]+)(?=\\frac|\ )\ ?)?"
    rf"(?:\\frac\{{(?P<above>[+-]?{_DECIMAL})\}}\{{(?P<below>{_DECIMAL})\}}|(?P<top>{_DECIMAL})/(?P<bottom>{_DECIMAL}))"
    rf"|(?P<decimal>{_DECIMAL})(?:[eE](?P<exponent>[+-]?[0-9]{{1,3}})|(?:\\times|\\cdot)10\^(?P<ten>{_EXPONENT}))?"
    rf"|10\^(?P<alone>{_EXPONENT}))"
)
_GREEK = (
    "alpha beta delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega Gamma Delta Theta"
    " Lambda Xi Pi Sigma Upsilon Phi Psi Omega gamma pi hbar ell"
)
_ACCENTS = frozenset(str.split(r"\vec \hat \bar \overline \tilde \widehat \widetilde \overrightarrow"))
_KNOWN = (
    FUNCTIONS
    | _ACCENTS
    | frozenset("\\" + name for name in str.split(_GREEK))
    | frozenset(
        str.split(
            r"\frac \sqrt \binom \infty \int \iint \lim \to \mod \det \cdot \times \lfloor \rfloor \lceil \rceil \sum \prod \circ"
        )
    )
)
_SIGNS = frozenset("+-/^_(){}|!=,")
_INDEXED = (r"\sum", r"\prod", r"\int", r"\iint", r"\lim")
_BINARY = frozenset(["/", "^", "_", r"\cdot", r"\times", "=", ","])
EULER, IMAGINARY = "eta_{98}", "eta_{99}"
_ALIASES = {
    r"\gamma": r"\eta_{90}",
    r"\ell": r"\eta_{91}",
    r"\Gamma": r"\eta_{92}",
    "I": r"\eta_{93}",
    "e": rf"\{EULER}",
    "i": rf"\{IMAGINARY}",
}
"""Symbols for things that the parser would read wrongly. ``EULER`` and ``IMAGINARY`` become constants again."""


def rational(found: Sequence[Token]) -> Fraction | None:
    r"""Returns the value of ``-1.5``, ``1\frac{1}{2}``, ``3/4``, ``1.5\times10^{3}``; None if it is not such a number."""
    letters = any(token.kind in ("letter", "word") for token in found)
    match = None if letters else _RATIONAL.fullmatch(joined(found))
    if match is None:
        return None
    parts = match.groupdict(default="")
    value: Fraction
    if parts["inner"]:
        value = Fraction(parts["inner"])
    elif parts["below"] or parts["bottom"]:
        top, bottom = Fraction(parts["above"] or parts["top"]), Fraction(parts["below"] or parts["bottom"])
        if bottom == 0 or (parts["whole"] and not (0 < top < bottom)):
            return None
        value = Fraction(parts["whole"] or 0) + top / bottom
    else:
        exponent = parts["exponent"] or (parts["ten"] or parts["alone"]).strip("{}") or 0
        value = Fraction(parts["decimal"] or 1) * Fraction(10) ** int(exponent)
    return -value if parts["sign"] == "-" else value


def formula(found: Sequence[Token]) -> str | None:
    """Returns LaTeX for the parser; None if a token or its place is unknown, which the parser might leave out."""
    if not found or found[0].text in _BINARY or found[-1].text in _BINARY | {"+", "-"} or _towers(found):
        return None
    out: list[str] = []
    scripts: list[bool] = []
    """For each open bracket, True if it is a subscript."""
    arguments = 0
    last = Token("sign", "")
    in_matrix = any(token.text.startswith(r"\begin") for token in found)
    has_index = any(token.text in _INDEXED for token in found)
    for position, token in enumerate(found):
        text, script = token.text, any(scripts)
        if text in OPENING:
            scripts.append(last.text == "_" and text == "{")
            arguments += text == "(" and last.text in FUNCTIONS
        elif text in CLOSING:
            if not scripts:
                return None
            scripts.pop()
        bare = (
            position > 2 and found[position - 2].text in ("_", "^" if has_index else "_") and token.kind == "number"
        )  # \log_2 8
        if not _is_known(
            token, Token("sign", "") if bare else last, found[position + 1 :], in_script=script, in_matrix=in_matrix
        ):
            return None
        if (text in "=," and not script and not arguments) or (text == "=" and not has_index):
            return None
        if out and _multiplies(found[position - 2].text if position > 1 else "", last, token):
            out.append(r"\cdot ")
        elif last.text.startswith("\\") and last.text[-1].isalpha() and text[0].isalnum():
            out.append(" ")
        index = script or has_index or last.text == "_" or (last.text == "{" and found[position - 2].text in _ACCENTS)
        written = text.lstrip("\\") if script and text in FUNCTIONS else text if index else _ALIASES.get(text, text)
        if token.kind == "number" and "e" in (float_ := text.casefold()):
            written = "({}\\cdot 10^{{{}}})".format(*float_.split("e"))
        braced = last.text == "_" or (last.text == "^" and (has_index or len(written) > 1))
        out.append(f"{{{written}}}" if braced and token.kind in ("number", "letter") else written)
        last = token
    return None if scripts else "".join(out)


def _towers(found: Sequence[Token]) -> bool:
    """Returns True for ``2^3^2``, which people and parsers read in two ways."""
    return any(token.text == "^" and found[i - 2].text == "^" for i, token in enumerate(found) if i > 1)


def _is_known(token: Token, last: Token, rest: Sequence[Token], *, in_script: bool, in_matrix: bool) -> bool:
    text = token.text
    if token.kind == "word":
        return in_script and text.isalpha() and text.isascii()
    if text[:6] in (r"\begin", r"\end{p", r"\end{v", r"\end{b") or (text in ("&", r"\\") and in_matrix):
        return True
    if token.kind == "number":
        return last.kind != "number" and not (rest and rest[0].text == "_") and not text.endswith(".")
    if token.kind == "command":
        if text == r"\circ":
            return last.text == "^"
        return text in _KNOWN or text.startswith(r"\sqrt[")
    if token.kind == "sign" and text == "!":
        return last.text != "!" and last.text not in _BINARY
    if token.kind == "sign" and last.text in _BINARY and text in _BINARY:
        return False
    return token.kind == "letter" or text in _SIGNS


def _multiplies(before: str, last: Token, token: Token) -> bool:
    r"""Returns True if two parts side by side are a product, where the parser would take ``3(4)`` for a mixed number; not in
    ``\sin^2(x)`` and ``\log_2(8)``.
    """
    if token.text == "(":
        return last.text == ")" or (last.kind == "number" and before not in ("^", "_"))
    return token.kind == "number" and last.text == ")"
