"""Reads a task's ground truth: a number, or text in the forms that datasets use."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

from rlhf_host import Unjudged
from rlhf_plugin_math_verifier.answers import Choice, Doubtful, Moment, Words
from rlhf_plugin_math_verifier.characters import tidy
from rlhf_plugin_math_verifier.extraction import boxed, hashes
from rlhf_plugin_math_verifier.judging import read_label as read
from rlhf_plugin_math_verifier.prose import stated

MAX_LABEL_CHARS = 1000


@dataclass(frozen=True, slots=True)
class Label:
    """A task's label. ``prose``: answers to it may be words."""

    text: str
    prose: bool = False


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


@lru_cache(maxsize=4096)
def _read_text(text: str) -> Label | Unjudged:
    text = hashes(text, prose=True) or boxed(text) or text
    if isinstance(read(text), Doubtful) and (announced := stated(text) or stated(text, prose=True)):
        text = announced
    if len(text) > MAX_LABEL_CHARS or not tidy(text):
        return Unjudged(f"the label is empty or longer than {MAX_LABEL_CHARS} characters")
    return Label(text, prose=isinstance(read(text), Words | Choice | Moment | Doubtful))
