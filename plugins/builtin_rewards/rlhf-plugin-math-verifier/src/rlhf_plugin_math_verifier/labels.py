"""Reads a task's ground truth: a number, or text in the forms that datasets use."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rlhf_plugin_math_verifier.extraction import boxed, stated
from rlhf_plugin_math_verifier.plain import Number, number, tidy, words

MAX_LABEL_CHARS = 1000


@dataclass(frozen=True, slots=True)
class Label:
    """``text`` for math-verify; ``number`` or ``words`` where it is plain."""

    text: str
    number: Number | None = None
    words: str | None = None


def read_label(ground_truth: Any) -> Label | None:
    """``72``, ``"72"``, ``"1,234"``, ``"\\boxed{3/4}"``, ``"$\\frac{3}{4}$"``, ``"50%"``, GSM8K's ``"... #### 72"``.

    ``None``: nothing that an answer could be compared with.
    """
    if isinstance(ground_truth, bool):
        return None
    if isinstance(ground_truth, int | float):
        if not math.isfinite(ground_truth) or abs(ground_truth) >= 10**300:
            return None
        return Label(str(ground_truth), Number(Fraction(str(ground_truth))))
    return _read_text(ground_truth) if isinstance(ground_truth, str) else None


@lru_cache(maxsize=4096)
def _read_text(text: str) -> Label | None:
    if "####" in text:
        text = text.rpartition("####")[2].strip().partition("\n")[0]
    else:
        text = boxed(text) or stated(text) or stated(text, prose=True) or text
    if len(text) > MAX_LABEL_CHARS or not (text := tidy(text)):
        return None
    return Label(text, number(text), words(text))
