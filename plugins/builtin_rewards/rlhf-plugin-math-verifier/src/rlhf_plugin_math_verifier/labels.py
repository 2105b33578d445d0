"""Reads a task's ground truth: a number, or text in the forms that datasets use."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rlhf_host import Unjudged
from rlhf_plugin_math_verifier.extraction import boxed, stated
from rlhf_plugin_math_verifier.plain import Number, number, tidy, words

MAX_LABEL_CHARS = 1000


@dataclass(frozen=True, slots=True)
class Label:
    """``text`` for math-verify; ``number`` or ``words`` where it is plain."""

    text: str
    number: Number | None = None
    words: str | None = None


def read_label(ground_truth: Any) -> Label | Unjudged:
    """``72``, ``"72"``, ``"1,234"``, ``"\\boxed{3/4}"``, ``"$\\frac{3}{4}$"``, ``"50%"``, GSM8K's ``"... #### 72"``.

    ``Unjudged``, with the reason: nothing that an answer could be compared with.
    """
    if isinstance(ground_truth, int | float) and not isinstance(ground_truth, bool):
        if not abs(ground_truth) < 10**300:  # nor is NaN
            return Unjudged("the label is not a finite number below 1e300")
        return Label(str(ground_truth), Number(Fraction(str(ground_truth))))
    if not isinstance(ground_truth, str):
        return Unjudged(f"the label is not a text or a number but {type(ground_truth).__name__}")
    return _read_text(ground_truth)


@lru_cache(maxsize=4096)
def _read_text(text: str) -> Label | Unjudged:
    if "####" in text:
        text = text.rpartition("####")[2].strip().partition("\n")[0]
    else:
        text = boxed(text) or stated(text) or stated(text, prose=True) or text
    if len(text) > MAX_LABEL_CHARS or not (text := tidy(text)):
        return Unjudged(f"the label is empty or longer than {MAX_LABEL_CHARS} characters")
    return Label(text, number(text), words(text, label=True))
