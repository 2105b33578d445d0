"""A body of JSON as values, within limits. It imports only the standard library: ``bodies.py`` also runs it as a program."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import re
import sys
from typing import Any

DEPTH = 100
"""Maximum nesting of lists and objects."""
NESTED = 200_000
"""Maximum number of lists and objects."""
VALUES = 2_000_000
"""Maximum number of values of all lists and objects together, such as token ids."""
PIECE = 1024
"""Number of values of a list that are written at once."""
MEMORY = 1 << 30
"""Maximum bytes of memory of the program."""

STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)


def read_object(raw: bytes) -> dict[str, Any]:
    """Returns the JSON object in ``raw``. Raises ``ValueError`` for anything else, and for one above the limits."""
    text = raw.decode("utf-8")
    # Before it is read, as a list takes thirty times the memory of its two brackets; those in strings seldom make a difference.
    if _has_many(raw) and _has_many(STRING.sub(b"", raw)):
        raise ValueError(f"it has more than {NESTED:,} lists and objects, or {VALUES:,} values")
    try:
        value = json.loads(text)
        flat = _is_flat(value)
    except RecursionError:
        flat = False
    if not flat:
        raise ValueError(f"it is nested too deeply: at most {DEPTH} levels")
    if not isinstance(value, dict):
        raise ValueError("it is no object")
    if "\\ud" in text or "\\uD" in text:
        json.dumps(value, ensure_ascii=False).encode()  # half a character is no text
    return value


def _has_many(marks: bytes) -> bool:
    nested = marks.count(b"[") + marks.count(b"{")
    return nested > NESTED or nested + marks.count(b",") > VALUES


def _is_flat(value: Any) -> bool:
    level = [value]
    for _ in range(DEPTH):
        level = [each for each in level if isinstance(each, dict | list)]
        level = [member for each in level for member in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return True
    return False


def main() -> None:
    """Reads standard input and writes the object, or its problem, to standard output.

    It is written in pieces that are quickly read: each is a pickled ``(key, more, value)`` after its length. Long lists are
    several pieces, whose ``more`` is true. A problem has no key. The end has the length 0.
    """
    gc.disable()
    os.nice(10)
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        value = read_object(sys.stdin.buffer.read())
    except (ValueError, MemoryError) as error:
        _write(None, False, str(error) or "it takes too much memory")
        return
    for key, member in value.items():
        if isinstance(member, list) and len(member) > PIECE:
            for first in range(0, len(member), PIECE):
                _write(key, True, member[first : first + PIECE])
        else:
            _write(key, False, member)
    sys.stdout.buffer.write(bytes(8))


def _write(key: str | None, more: bool, value: Any) -> None:
    piece = pickle.dumps((key, more, value), pickle.HIGHEST_PROTOCOL)
    sys.stdout.buffer.write(len(piece).to_bytes(8, "big") + piece)


if __name__ == "__main__":
    main()
