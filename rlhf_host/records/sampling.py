"""Limits of sampling settings: one table for settings, agents, servers and engines. Outside of them, numbers overflow, and with
them every answer of the same batch.
"""

from __future__ import annotations

import reprlib
from numbers import Integral, Real
from typing import Any

from rlhf_host.records.episodes import Sampling

COLDEST, HOTTEST = 0.01, 100.0
"""Below the first, a distribution is greedy except for rounding, and vLLM uses this temperature instead. Above the second, it
is uniform.
"""
MOST = 2**31 - 1

NUMBERS: dict[str, tuple[type, float, float, str]] = {
    "max_new_tokens": (Integral, 1, MOST, f"a whole number from 1 to {MOST}"),
    # A little less than the coldest: it may have been rounded to float32.
    "temperature": (Real, COLDEST * (1 - 1e-6), HOTTEST, f"0 (greedy), or a number from {COLDEST:g} to {HOTTEST:g}"),
    "top_p": (Real, 1e-6, 1, "a number from 0.000001 to 1"),
    "top_k": (Integral, 0, MOST, f"a whole number from 0 to {MOST}"),
    "min_p": (Real, 0, 1, "a number from 0 to 1"),
}
"""Field of ``Sampling`` → its type, the least and the largest value, and a text that says which values are valid."""
LISTS = {"stop": "texts, none of them empty", "stop_token_ids": f"whole numbers from 0 to {MOST}"}
"""The same for fields with several values."""


def misfit(sampling: Sampling) -> str | None:
    """Returns what is wrong with it, as ``NAME should be ..., not ...``."""
    for name in (*NUMBERS, *LISTS):
        if rule := broken_rule(name, value := getattr(sampling, name)):
            return f"{name} should be {rule}, not {reprlib.repr(value)}"
    return None


def broken_rule(name: str, value: Any) -> str | None:
    """Returns which values the field has, if this is none of them."""
    if name in NUMBERS:
        kind, least, most, rule = NUMBERS[name]
        fits = _is_number(value, kind, least, most) or (name == "temperature" and _is_number(value, Real, 0, 0))
        return None if fits else rule
    if not isinstance(value, tuple | list):
        return LISTS[name]
    if name == "stop":
        fits = all(isinstance(one, str) and one for one in value)
    else:
        fits = all(_is_number(one, Integral, 0, MOST) for one in value)
    return None if fits else LISTS[name]


def _is_number(value: Any, kind: type, least: float, most: float) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and bool(least <= value <= most)  # type: ignore[operator]
