"""Limits of sampling settings: one table for settings, agents, servers and engines. Outside of them, numbers overflow, and with
them every answer of the same batch.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

from rlhf_host.records.episodes import Sampling

COLDEST, HOTTEST = 0.01, 100.0
"""Below the first, a distribution is greedy except for rounding, and vLLM uses this temperature instead. Above the second, it
is uniform.
"""
MOST = 2**31 - 1


def _is_number(value: Any, least: float, most: float) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and bool(least <= value <= most)  # type: ignore[operator]


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, Integral) and _is_number(value, least, MOST)


def _is_temperature(value: Any) -> bool:
    return _is_number(value, 0, 0) or _is_number(value, COLDEST * (1 - 1e-6), HOTTEST)  # in float32 too


def _all(values: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(values, tuple | list) and all(map(fits, values))


RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (lambda value: _is_count(value, 1), f"a whole number from 1 to {MOST}"),
    "temperature": (_is_temperature, f"0 (greedy), or a number from {COLDEST:g} to {HOTTEST:g}"),
    "top_p": (lambda value: _is_number(value, 1e-6, 1), "a number from 0.000001 to 1"),
    "top_k": (lambda value: _is_count(value, 0), f"a whole number from 0 to {MOST}"),
    "min_p": (lambda value: _is_number(value, 0, 1), "a number from 0 to 1"),
    "stop": (lambda value: _all(value, lambda one: isinstance(one, str) and bool(one)), "texts, none of them empty"),
    "stop_token_ids": (lambda value: _all(value, lambda one: _is_count(one, 0)), f"whole numbers from 0 to {MOST}"),
}
"""Field of ``Sampling`` → a check of a value, and a text that says which values are valid."""


def misfit(sampling: Sampling) -> str | None:
    """Returns what is wrong with it, as ``NAME should be ..., not ...``."""
    for name, (fits, rule) in RULES.items():
        if not fits(value := getattr(sampling, name)):
            return f"{name} should be {rule}, not {reprlib.repr(value)}"
    return None
