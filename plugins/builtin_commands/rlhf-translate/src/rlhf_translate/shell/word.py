"""A word of a shell script, and its parts without a value."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Word:
    text: str
    line: int
    missing: tuple[str, ...] = ()
    """Parts of the text that only a run of the script would replace: ``${NAME}``, ``$(COMMAND)``."""

    def without(self, parts: Iterable[str]) -> str:
        """Returns the text without these parts."""
        text = self.text
        for part in parts:
            text = text.replace(part if part in text else part.partition(" (")[0], "")
        return text


Value: TypeAlias = Word | list[Word]
"""Value of a variable; a list for an array."""


PLACES = r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|\$\{[^{}]*\}|`[^`]*`"
"""Pattern of what only a run of the script would replace."""
_PART = re.compile(rf"(?:{PLACES}|[^ \t\n])+")


def split(word: Word, line: int) -> list[Word]:
    """Returns its parts between blanks, each with its unknown parts; an empty one if it begins or ends with a blank."""
    parts = _PART.findall(word.text)
    places = {missing: missing if missing in word.text else missing.partition(" (")[0] for missing in word.missing}

    def in_part(part: str) -> tuple[str, ...]:
        changed = "$" in part or "`" in part  # where what has no value is shown in another way
        return tuple(name for name, place in places.items() if place in part or (changed and place not in word.text))

    empty = Word("", line)
    if not parts:
        return [empty] * (2 if word.text else 1)
    ends = [word.text[:1].isspace(), word.text[-1:].isspace()]
    return [*[empty] * ends[0], *(Word(part, line, in_part(part)) for part in parts), *[empty] * ends[1]]


def joined(words: Iterable[Word], line: int, between: str = " ") -> Word:
    """Returns several words as one."""
    words = list(words)
    return Word(between.join(word.text for word in words), line, union(words))


def union(words: Iterable[Word]) -> tuple[str, ...]:
    """Returns the unknown parts of all of them."""
    return tuple(dict.fromkeys(part for word in words for part in word.missing))
