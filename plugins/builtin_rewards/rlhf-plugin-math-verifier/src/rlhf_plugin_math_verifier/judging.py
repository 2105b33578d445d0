"""The verdict on an answer: at once if plain comparison is enough; a worker process does the same, with algebra."""

from __future__ import annotations

import ast
import contextlib
import json
from functools import lru_cache
from typing import Any, Literal

from rlhf_plugin_math_verifier.answers import Answer, Doubtful, Several
from rlhf_plugin_math_verifier.claims import ITEM, Claim
from rlhf_plugin_math_verifier.comparing import Algebra, Verdict, compare
from rlhf_plugin_math_verifier.decoration import unquoted
from rlhf_plugin_math_verifier.reading import MAX_CHARS, other_readings, read

Judged = Literal["right", "wrong", "unjudged", "label"]
"""Verdict; ``label``: nothing can be compared with the label."""


class NeedsAlgebra(Exception):
    """Raised if plain comparison does not decide."""


class Unreadable(Exception):
    """The label has no value."""


class NoAlgebra:
    """Algebra that leaves formulas to a worker."""

    def same(self, *_: object) -> Verdict:
        raise NeedsAlgebra

    same_equation = same_region = parser_agrees = same


@lru_cache(maxsize=4096)
def read_label(text: str) -> Answer:
    """Returns the label's reading; ``["18", "20"]``, the form of several labels in data sets, is a sequence ``listed``."""
    if text.startswith("[") and text.endswith("]"):
        values = _list(text)
        if len(values) == 1 and type(values[0]) in (str, int, float):
            return read(str(values[0]), label=True)
        if len(values) > 1 and all(isinstance(each, str) for each in values):
            items = tuple(read(each, label=True) for each in values)
            return Doubtful(text) if any(isinstance(each, Doubtful) for each in items) else Several("listed", items)
    return read(text, label=True)


def _list(text: str) -> list[Any]:
    """Returns a list as JSON or Python writes it; empty if it is not one."""
    for parse in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            if isinstance(found := parse(text), list):
                return found
    return []


def judge(label: str, claim: Claim, decimals: int, algebra: Algebra) -> Judged:
    """Returns ``right``, ``wrong``, ``unjudged`` (a person would have to decide) or ``label``."""
    own = read_label(label)
    if isinstance(own, Doubtful):
        said = read(claim.text) if claim.text else None
        same = isinstance(said, Doubtful) and own.text == said.text != "" and any(map(str.isalnum, own.text))
        return "label" if not same else "unjudged" if claim.doubt or claim.against else "right"
    if not _has_value(own, algebra):
        return "label"
    if label.split() == claim.text.split():
        verdict: Verdict = "right"
    else:
        verdict = _of_text(own, label, claim.text, decimals, algebra) if claim.text else "wrong"
    if verdict == "right":
        contradicted = claim.against and _of_text(own, label, claim.against, decimals, algebra) == "wrong"
        return "unjudged" if claim.doubt or contradicted else "right"
    rivals = (*claim.rivals, claim.against) if claim.against else claim.rivals
    if verdict == "wrong" and any(_of_text(own, label, rival, decimals, algebra) != "wrong" for rival in rivals):
        return "unjudged"
    return verdict


def _of_text(own: Answer, label: str, text: str, decimals: int, algebra: Algebra) -> Verdict:
    """Compares one text with the label by value. What is not read as a whole is never right; it is wrong only if nothing in it
    is the label, for this reader and for math-verify's.
    """
    said = read(text)
    verdict = compare(own, said, decimals, algebra)
    if verdict != "wrong":
        return verdict
    if any(compare(own, other, decimals, algebra) != "wrong" for other in other_readings(text)):
        return "unjudged"
    if not isinstance(said, Doubtful) or said.denied or len(text) > MAX_CHARS:
        return "wrong"
    parts = (unquoted(match.group()) for match in ITEM.finditer(text))
    if any(compare(own, read(part), decimals, algebra) != "wrong" for part in parts if part != text):
        return "unjudged"
    mathematical = any(character.isdigit() or character in "\\^=" for character in text)
    return "unjudged" if mathematical and algebra.parser_agrees(label, text) else "wrong"


@lru_cache(maxsize=4096)
def _has_value(label: Answer, algebra: Any) -> bool:
    """Returns True if the label equals itself: 0/0 does not."""
    try:
        return compare(label, label, 6, algebra) == "right"
    except Unreadable:
        return False
