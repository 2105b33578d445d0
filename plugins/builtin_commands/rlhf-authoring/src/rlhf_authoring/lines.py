"""Texts in files of others, as messages may show them, and what is wrong with such a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator

from rlhf_host.commands import near_matches, visible
from rlhf_host.installed import GROUPS

SHOWN = 200
"""Characters of a value or of another program's text that a message has."""


def _line(text: str) -> str:
    if visible(text) != text or not text.strip():
        raise ValueError("must be a line of text without control characters")
    return text


Line = Annotated[str, AfterValidator(_line)]


def kind_of_plugin(kind: str) -> str:
    """Raises ``ValueError`` for what is no kind."""
    if kind not in GROUPS:
        raise ValueError(f"is no kind of plugin{near_matches(kind, GROUPS) or '; choose one of ' + ', '.join(GROUPS)}")
    return kind


def short(value: object) -> str:
    """On one line, and not too long for a message."""
    line = visible(" ".join(str(value).split()))
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}..."


def explain(problem: Mapping[str, Any], what: str, known: Iterable[str]) -> str:
    """``distributions[2].plugins[0].kind: ...`` of an error of pydantic's; ``known``: all keys of such a ``what``."""
    keys = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"])
    where = short(keys.removeprefix("."))
    if problem["type"] == "json_invalid":
        return str(problem["msg"])
    if problem["type"] == "missing":
        return f"{where} is missing"
    if problem["type"] == "extra_forbidden":
        return f"{where} is no key of such a {what}{near_matches(str(problem['loc'][-1]), known)}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{where or f'the {what}'}: {message}" + (
        f" (got {short(repr(problem['input']))})" if isinstance(problem["input"], str) else ""
    )
