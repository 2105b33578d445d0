"""Letters of a multiple choice: ``(B)``, ``B. Paris``, ``\\textbf{(B)}\\ 12``."""

from __future__ import annotations

import re

from rlhf_plugin_math_verifier.decoration import tidy

MAX_CHARS = 300

_WRAPPED = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_LEAD = re.compile(
    r"(?:the\s+)?(?:(?:correct|right|best)\s+)?(?:option|choice|answer|letter)?(?:\s+is)?\s*:?\s*(?=\(?[A-J]\b)", re.IGNORECASE
)
_CHOICE = re.compile(r"\(?\s*([A-J])\s*(?:[).:](.*))?", re.DOTALL)
_OTHER_CHOICE = re.compile(
    r"(?<![\w\\])(?<!\w\()([A-HJ](?![\w=]|-\w| =)|I(?=[):]))"  # not P(B), F = ma, B-cells, "I think so"
    r"|(?:^\(?|\s\(?)([a-j])[).:;](?!\w)"
)
"""Pattern of another choice: any letter of a choice that stands alone in upper case, or before ``) . : ;``, except for
``_NAMED``.
"""
_NAMED = re.compile(
    r"^\W*A (?!(?:is|or|and)\b)[a-z]"
    r"|(?<!\w)(?:[A-J](?:, ?[A-J])*,? (?:and|nor)|[Ee]ither [A-J] or) [A-J](?!\w)"
    r"|\b(?i:vitamins?|hepatitis|types?|group|grade|class|plan|points?|angle|side|sets?|events?) [A-J](?![\w).:]| and )"
    r"|(?:[0-9°]|\\circ\}?\$?)\s*[ACFGHJ](?![\w).:;])"
)
"""Pattern of letters in a choice's own text: "A dog", "both A and B", "either A or B", "vitamin C", ``25 °C``, ``5 J``."""


def _match(text: str) -> re.Match[str] | None:
    if len(text) > MAX_CHARS:
        return None
    text = tidy(_WRAPPED.sub(r" \1", tidy(text)))
    lead = _LEAD.match(text)
    return _CHOICE.fullmatch(text, lead.end() if lead else 0)


def letter(text: str, *, label: bool = False) -> str | None:
    """Returns the letter, folded; None if the text is not a choice, or names another one (which a ``label``'s own text may do)."""
    match = _match(text)
    if match is None:
        return None
    own = match.group(1).casefold()
    others = _OTHER_CHOICE.finditer(_NAMED.sub(" ", match.group(2) or ""))
    return None if not label and any(other[other.lastindex or 0].casefold() != own for other in others) else own


def rest(text: str) -> str:
    """Returns the text beside the letter."""
    match = _match(text)
    return tidy(match.group(2) or "") if match else ""
