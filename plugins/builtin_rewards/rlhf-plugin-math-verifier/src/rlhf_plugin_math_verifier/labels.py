"""Reads a task's ground truth: a number, or text in the forms that datasets use."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from itertools import pairwise
from typing import Any

from rlhf_host import Unjudged
from rlhf_plugin_math_verifier.answers import Choice, Doubtful, Moment, Several, Words
from rlhf_plugin_math_verifier.candidates import Place, box_places, find, hash_places
from rlhf_plugin_math_verifier.decoration import tidy
from rlhf_plugin_math_verifier.judging import read_label as read

MAX_LABEL_CHARS = 1000
_PLACEHOLDERS = frozenset(str.split("n/a na #n/a nan null nil tbd todo ? - -- [] {} <answer>", " ")) | {
    "no answer",
    "not available",
    "not applicable",
    "see solution",
    "none given",
}
"""Texts that data sets have in place of an answer."""


@dataclass(frozen=True, slots=True)
class Label:
    """A task's label. ``prose``: answers to it may be words; ``parts``: it has so many values."""

    text: str
    prose: bool = False
    parts: int = 1


def read_label(ground_truth: Any) -> Label | Unjudged:
    r"""Reads ``72``, ``"1,234"``, ``"\boxed{3/4}"``, ``"50%"``, GSM8K's ``"... #### 72"``, ``["18"]``, ``'["18"]'``, a date.

    Returns ``Unjudged``, with the reason, if an answer cannot be compared with it.
    """
    if isinstance(ground_truth, int | float | Decimal) and not isinstance(ground_truth, bool):
        if not -(10**300) < ground_truth < 10**300:  # nor is NaN
            return Unjudged("the label is not a finite number below 1e300")
        return Label(str(ground_truth))
    if isinstance(ground_truth, datetime.date) and not isinstance(ground_truth, datetime.datetime):
        return Label(ground_truth.isoformat(), prose=True)
    if (
        isinstance(ground_truth, list | tuple)
        and ground_truth
        and all(type(each) in (str, int, float) for each in ground_truth)
    ):
        if len(ground_truth) == 1:
            return read_label(ground_truth[0])
        return _read_text(json.dumps([str(each) for each in ground_truth]))
    if not isinstance(ground_truth, str):
        return Unjudged(f"the label is not a text or a number but {type(ground_truth).__name__}")
    return _read_text(ground_truth)


_BETWEEN = re.compile(
    r"(?:[\s$,;&.:]|\\[,;: ()\[\]]|\\q?quad\b|\\(?:text|textrm|mathrm)\{[\s,;]*(?:and[\s,]*)?\}|\band\b)*", re.IGNORECASE
)
"""What may stand between the boxes of an answer with several values."""


def _of_boxes(text: str, places: Sequence[Place]) -> str:
    """Returns the values of all boxes, if nothing is between them; otherwise the last one's: those before are steps."""
    between = [text[one.end : other.start] for one, other in pairwise(places)]
    joined = len(places) > 1 and all(map(_BETWEEN.fullmatch, between))
    return ", ".join(dict.fromkeys(place.content for place in places)) if joined else places[-1].content


@lru_cache(maxsize=4096)
def _read_text(text: str) -> Label | Unjudged:
    if places := hash_places(text):
        text = places[-1].content
    elif places := box_places(text):
        text = _of_boxes(text, places)
    if isinstance(read(text), Doubtful):
        for prose in (False, True):
            if (found := find(text, prose=prose)) and found.form == "stated" and found.claim.text:
                text = found.claim.text
                break
    if len(text) > MAX_LABEL_CHARS or not tidy(text):
        return Unjudged(f"the label is empty or longer than {MAX_LABEL_CHARS} characters")
    answer = read(text)
    if tidy(text).casefold() in _PLACEHOLDERS or (isinstance(answer, Doubtful) and not any(map(str.isalnum, text))):
        return Unjudged(f"the label {text!r} is no answer")
    parts = len(answer.items) if isinstance(answer, Several) and answer.kind != "matrix" else 1
    return Label(text, prose=isinstance(answer, Words | Choice | Moment | Doubtful), parts=parts)
