"""Criteria of a row: a list of what an answer should have, and of what it should not, each with a weight."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_plugin_llm_judge.json_verdict import finite, once_each

TEXTS = ("criterion", "description")
WEIGHTS = ("weight", "points")
OTHERS = ("required", "title", "tags")
FORM = '[{"criterion": "...", "weight": 1}, ...]'


@dataclass(frozen=True, slots=True)
class Criterion:
    text: str
    weight: float
    """Below 0: a fault that the answer should not have."""
    required: bool
    """True: without it the answer is worth nothing."""


def criteria_of(value: Any) -> list[Criterion]:
    """Returns the criteria of a column, which may be JSON in a text. Raises ``ValueError`` for what is no such list."""
    if isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=once_each)
        except (json.JSONDecodeError, RecursionError):
            raise ValueError(f"it is a text that is not JSON; write {FORM}") from None
        except ValueError as error:
            raise ValueError(f"its JSON cannot be read: {error}") from None
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        raise ValueError(f"it is {_kind(value)}; write {FORM}")
    criteria = [_criterion(number, item) for number, item in enumerate(value, 1)]
    if not any(criterion.weight > 0 for criterion in criteria):
        raise ValueError("no criterion has a weight above 0, so no answer could be worth anything")
    if not math.isfinite(sum(abs(criterion.weight) for criterion in criteria)):
        raise ValueError("its weights are too large: their sum is no finite number")
    return criteria


def share(criteria: Sequence[Criterion], met: Sequence[bool]) -> float:
    """Returns the weights of what is met by the sum of those above 0, from 0 to 1; 0 if a required criterion is not met.

    As HealthBench scores (Arora et al. 2025, arXiv 2505.08775): points below 0 count against it.
    """
    pairs = list(zip(criteria, met, strict=True))
    if any(criterion.required and not is_met for criterion, is_met in pairs):
        return 0.0
    points = sum(criterion.weight for criterion, is_met in pairs if is_met)
    return min(1.0, max(0.0, points / sum(criterion.weight for criterion in criteria if criterion.weight > 0)))


def _criterion(number: int, item: Any) -> Criterion:
    if not isinstance(item, Mapping):
        raise ValueError(f"item {number} is {_kind(item)}; write {FORM}")
    given = {name: value for name, value in item.items() if value is not None}  # columns of tables have nulls
    if odd := [name for name in given if name not in (*TEXTS, *WEIGHTS, *OTHERS)]:
        raise ValueError(f"item {number} has {odd[0]!r}; an item may have {', '.join((*TEXTS, *WEIGHTS, *OTHERS))}")
    text, weight, required = _one(number, given, TEXTS, ""), _one(number, given, WEIGHTS, 1.0), given.get("required", False)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"item {number} has no criterion, which is a text")
    if not finite(weight) or not weight:
        raise ValueError(f"item {number} has the weight {weight!r}; it is a number other than 0")
    if not isinstance(required, bool):
        raise ValueError(f"item {number}: required is true or false, not {required!r}")
    if required and weight < 0:
        raise ValueError(f"item {number} is required and has a weight below 0: say what the answer must have")
    return Criterion(text.strip(), float(weight), required)


def _one(number: int, given: Mapping[str, Any], names: Sequence[str], default: Any) -> Any:
    found = [name for name in names if name in given]
    if len(found) > 1:
        raise ValueError(f"item {number} has {' and '.join(found)}: keep one")
    return given[found[0]] if found else default


def _kind(value: Any) -> str:
    return "nothing" if value is None or value == [] else f"a {type(value).__name__}, not a list of objects"
