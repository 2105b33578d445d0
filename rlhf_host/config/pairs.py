"""Settings that are lists of ``KEY=VALUE`` texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rlhf_host.errors import UserError

PYTHON = {"True": True, "False": False, "None": None}


def read_pairs(texts: Sequence[str], setting: str, example: str) -> dict[str, Any]:
    """Returns the values by key, in order; a value is JSON, one of Python's ``True``, ``False`` and ``None``, or else a text.

    Args:
        setting: its name, for messages.
        example: a text that could be given, for messages.

    Raises:
        UserError: a text has another form, or two have the same key.
    """
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"{setting} {text!r}: write KEY=VALUE, such as {example}")
        if name in values:
            raise UserError(f"{setting} {text!r}: {name} is given twice")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = PYTHON.get(value, value)
    return values
