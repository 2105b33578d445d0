"""Checks of values in rows: texts, and earlier turns."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from rlhf_host.data.bad_rows import Malformed, check_text, kind_of


def text_of(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise Malformed(f"{key!r} must be a text, not {kind_of(value)}")
    if not value.strip():
        raise Malformed(f"{key!r} is empty")
    check_text(value, key)
    return value


def listed(value: Any) -> Any:
    """Returns a list that a table holds as text."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


def turns_of(history: Any) -> list[tuple[str, str]]:
    """Returns earlier questions and answers, from Alpaca's column ``history``."""
    history = listed(history)
    if not history:
        return []
    if not isinstance(history, list) or not all(isinstance(turn, list | tuple) and len(turn) == 2 for turn in history):
        raise Malformed("'history' must be a list of [question, answer]")
    return [(text_of(question, "history"), text_of(reply, "history")) for question, reply in history]
