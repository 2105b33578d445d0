"""Conditions of a shell script that can be judged without running it."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Sequence

from rlhf_translate.shell.word import Word

_NUMBERS = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_UNSET = re.compile(r"\$\{?(?:[A-Za-z_]\w*|[1-9]|@|\*)\}?")


def truth(words: Sequence[Word]) -> bool | None:
    """Returns True if a command of a condition succeeds; None if only a run of the script would tell."""
    if not words:
        return None
    first, rest = words[0].text, list(words[1:])
    if first in ("true", ":", "false"):
        return first != "false"
    if first in ("[", "[[") and rest and rest[-1].text == {"[": "]", "[[": "]]"}[first]:
        return _any(rest[:-1])
    return _any(rest) if first == "test" else None


def both(left: bool | None, right: bool | None) -> bool | None:
    return False if left is False or right is False else (True if left and right else None)


def negated(value: bool | None) -> bool | None:
    return None if value is None else not value


def either(left: bool | None, right: bool | None) -> bool | None:
    return negated(both(negated(left), negated(right)))


def _any(words: list[Word]) -> bool | None:
    for sign, join in (("||", either), ("-o", either), ("&&", both), ("-a", both)):
        for place, word in enumerate(words):
            if word.text == sign and 0 < place < len(words) - 1:
                return join(_any(words[:place]), _any(words[place + 1 :]))
    return _one(words)


def _one(words: list[Word]) -> bool | None:
    match [word.text for word in words]:
        case ["!", *_]:
            return negated(_one(words[1:]))
        case ["(", *_, ")"]:
            return _any(words[1:-1])
        case ["-z" | "-n" as sign, text]:
            known = _empty(words[1], text)
            return known if sign == "-z" else negated(known)
        case [text]:
            return negated(_empty(words[0], text))
        case ["-z"] | []:
            return None
        case [left, "=" | "==" | "!=" as sign, right]:
            if words[0].missing or words[2].missing:
                return None
            return fnmatch.fnmatchcase(left, right) == (sign != "!=")
        case [left, sign, right] if sign in _NUMBERS:
            if words[0].missing or words[2].missing or not all(re.fullmatch(r"-?\d+", text) for text in (left, right)):
                return None
            return bool(_NUMBERS[sign](int(left), int(right)))
    return None


def _empty(word: Word, text: str) -> bool | None:
    """Returns True if it is empty. A variable that the script does not set is empty, as for ``${NAME:-THIS}``."""
    if not word.missing:
        return not text
    return True if _UNSET.fullmatch(text) and word.missing == (text,) else None
