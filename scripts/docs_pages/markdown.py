"""Tables, code and docstrings as Markdown."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; what would be markup is escaped, and line ends become spaces."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    plain, quoted = (" ".join(text.replace("|", "\\|").split()).split("`")[part::2] for part in (0, 1))
    escaped = [part.replace("<", "&lt;") for part in plain]
    return "".join(a + (f"`{b}`" if b is not None else "") for a, b in zip_longest(escaped, quoted))


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def prose(text: str) -> str:
    """A docstring as Markdown: double backticks become single ones."""
    return re.sub(r"``([^`]+)``", r"`\1`", inspect.cleandoc(text))


def options_table(options: Iterable[Any]) -> str:
    rows = [
        (
            code(option.name),
            code(option.type),
            "required" if option.default is None else code(option.default),
            option.description,
        )
        for option in options
    ]
    return table(("option", "type", "default", ""), rows) if rows else "No options."
