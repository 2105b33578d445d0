"""The code of an answer."""

from __future__ import annotations

import re
from textwrap import dedent

_FENCE = re.compile(  # possessive, so that an answer of 20,000 backticks takes no time
    r"^(?P<before>[^\n]*?)(?<![`~])(?P<fence>`{3,}+|~{3,}+)[ \t]*+(?P<tag>[\w+#.{}-]*+)[ \t]*+(?:[\w-]++=[^\n`]*+)?\n"
    r"(?P<code>.*?)(?:(?P=fence)|\Z)",
    re.S | re.M,
)
_PYTHON = re.compile(r"py(?:thon)?[\d.]*", re.I)
_MARGIN = re.compile(r"[ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?")
"""Margin of a fence: spaces, or the mark of a list."""


def code_of(answer: str) -> str:
    """Returns the last block that is fenced as Python, or the last without a language, or the whole answer."""
    answer = answer.replace("\r\n", "\n")
    python, plain = [], []
    for block in _FENCE.finditer(answer):
        if _PYTHON.fullmatch(block["tag"].strip("{.}")):
            python.append(block)
        elif not block["tag"]:
            plain.append(block)
    if not (blocks := python or plain):
        return answer
    margin = len(blocks[-1]["before"]) if _MARGIN.fullmatch(blocks[-1]["before"]) else 0
    return re.sub(rf"^[ \t]{{1,{margin}}}", "", blocks[-1]["code"], flags=re.M) if margin else blocks[-1]["code"]


def solution_of(answer: str, before: str, header: str = "") -> str:
    """Returns the whole program. An answer that does not define the function that ``before`` begins is a continuation of it."""
    code = code_of(answer)
    whole = dedent(code) if code.lstrip("\n")[:1].isspace() else code
    if header:
        future = re.findall(r"^from __future__ .*\n", whole, re.M)
        return "".join([*future, header, "\n", re.sub(r"^from __future__ .*\n", "", whole, flags=re.M)])
    if not before:
        return whole
    begun = re.findall(r"^def (\w+)", before, re.M)
    defined = rf"^(?:async )?def {begun[-1]}\b" if begun else r"(?!)"
    # A body may begin with a helper of the same name.
    if re.search(defined, code, re.M) or (re.search(defined, whole, re.M) and not re.search(r"^return\b", whole, re.M)):
        return f"{_imports(before)}\n{whole}"
    return before + code


def _imports(code: str) -> str:
    """Returns the code before the last function: imports and helpers."""
    return code[: [match.start() for match in re.finditer(r"^def ", code, re.M)][-1]]
