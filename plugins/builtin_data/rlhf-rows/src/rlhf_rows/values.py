"""Checks of what only rows with answers have: answers, labels, numbers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from rlhf_host import Message
from rlhf_host.internals import Malformed, as_list, messages_of, text_of

Text: TypeAlias = str | list[Message]


def answer_of(value: Any, key: str, ignore: Collection[str] = ()) -> Text:
    """Returns a text, or messages that end with the assistant's."""
    value = as_list(value)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        return text_of(value, key)
    messages = messages_of(value, key, ignore)
    if messages[-1]["role"] != "assistant":
        raise Malformed(f"{key!r} must end with an assistant's message, not one of the role {messages[-1]['role']!r}")
    return messages


def label_of(value: Any, key: str, *, soft: bool) -> float:
    if isinstance(value, str):  # tables have nothing else
        value = {"true": 1, "1": 1, "false": 0, "0": 0}.get(value.lower(), value)
    number = value if isinstance(value, bool | int | float) else None
    if number is None or not (0 <= number <= 1) or (not soft and number not in (0, 1)):
        known = "a number from 0 to 1" if soft else "true or false, 1 or 0"
        raise Malformed(f"{key!r} must be {known}, not {value!r}")
    return float(number)


def number_of(value: Any, key: str) -> float:
    if isinstance(value, str):  # tables have nothing else
        with contextlib.suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Malformed(f"{key!r} must be a finite number, not {value!r}")
    return float(value)
