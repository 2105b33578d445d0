"""The verdict on an answer: at once if plain comparison is enough; a worker process does the same, with algebra."""

from __future__ import annotations

import ast
import contextlib
import json
from functools import lru_cache
from typing import Any, Literal

from rlhf_plugin_math_verifier.answers import Answer, Doubtful, Several
from rlhf_plugin_math_verifier.comparing import Algebra, Verdict, compare
from rlhf_plugin_math_verifier.reading import read

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

    same_equation = same_region = same


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


def judge(label: str, answer: str, decimals: int, algebra: Algebra) -> Judged:
    """Returns ``right``, ``wrong``, ``unjudged`` (a person would have to decide) or ``label``."""
    own = read_label(label)
    same_text = "".join(label.split()) == "".join(answer.split())
    if isinstance(own, Doubtful):
        said = read(answer)
        same_text = same_text or (isinstance(said, Doubtful) and own.text == said.text != "")
        return "right" if same_text and any(map(str.isalnum, label)) else "label"
    if same_text:
        return "right"
    if not _has_value(own, algebra):
        return "label"
    return compare(own, read(answer), decimals, algebra)


@lru_cache(maxsize=4096)
def _has_value(label: Answer, algebra: Any) -> bool:
    """Returns True if the label equals itself: 0/0 does not."""
    try:
        return compare(label, label, 6, algebra) == "right"
    except Unreadable:
        return False
