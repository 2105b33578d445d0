"""Finds the answer in a text: in ``<answer>``, in ``\\boxed{}``, after ``####``, after "answer is", or the last number or
LaTeX.

The text beside it counts: answers side by side are one answer of several parts, and one that its sentence takes back is none.
Every search is linear in the text, up to a constant: the text is a model's, and may be anything.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from rlhf_plugin_math_verifier.prose import ITEM, TRIES, Span, denied, has_mathematics, is_prose, last, replaced, stated

Place = TypeVar("Place")
Form = Literal["any", "boxed", "hashes"]

MAX_WORDS = 8
"""Maximum words in a tag; more words are sentences, which have their answer in one of them."""
_BRACES = re.compile(r"\\{1,4}(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)(?:</answer>|\Z)", re.DOTALL | re.IGNORECASE)
_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*([^\n]*)")
_NAME = r"\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([A-Za-z]\))?\s*(?:=|:|\\in\b)"
_BETWEEN = re.compile(
    rf"(?:\s|[$.,;:&~*]|\\[()\[\],;!\\]|\\q?quad\b|\\text\s*\{{\s*,?\s*(?:and|or)?\s*,?\s*\}}|\b(?:and|or)\b|\([a-z0-9]\)|[和与或、，。；]|{_NAME})*",
)
"""Pattern between answers that belong together."""


@dataclass(frozen=True, slots=True)
class Found:
    """Answer of a text, and the form in which it was found: ``last`` is the only form that is not marked as the answer."""

    text: str
    form: Literal["boxed", "tagged", "hashes", "stated", "last"]

    @property
    def marked(self) -> bool:
        return self.form != "last"


def extract(text: str, form: Form = "any", *, prose: bool = False) -> Found | None:
    """Returns the answer, the last of the first form that occurs: boxed, in tags, ``####``, "answer is", last number or LaTeX.

    ``prose``: the label is words, so the answer may be words.
    """
    if form == "any" and (found := tagged(text, prose=prose)) is not None:
        return Found(found, "tagged")
    return _untagged(text, form, prose=prose)


def _untagged(text: str, form: Form = "any", *, prose: bool = False) -> Found | None:
    if form != "hashes" and (found := boxed(text)) is not None:
        return Found(found, "boxed") if found else None
    if form != "boxed" and (found := hashes(text, prose=prose)) is not None:
        return Found(found, "hashes")
    if form != "any":
        return None
    if (found := stated(text, prose=prose)) is not None:
        return Found(found, "stated") if found else None
    if not prose and (found := last(text)) is not None:
        return Found(found, "last")
    return None


def tagged(text: str, *, prose: bool = False) -> str | None:
    """Returns the text between the last ``<answer>`` and ``</answer>``, and between those beside it."""
    if "<answer>" not in text.casefold():
        return None
    matches = list(_TAG.finditer(text))[-TRIES:]
    contents = []
    for match in _side_by_side(matches, text, lambda match: match.span()):
        inside = match[1].strip()
        found = _untagged(inside, prose=prose)
        whole = found is None or (not found.marked and len(inside.split()) <= MAX_WORDS)
        contents.append(inside if whole or found is None else found.text)
    return _together(contents) or None


def boxed(text: str) -> str | None:
    r"""Returns the contents of the last ``\boxed{...}`` that is closed and not empty, and of those beside it; of nested ones,
    the inner.

    Empty if its sentence takes it back.
    """
    spans = _boxes(text) if "boxed" in text or "fbox" in text else []
    while spans:
        chosen = _side_by_side(spans, text, lambda span: span)
        whole = (chosen[0][0], chosen[-1][1])
        if (instead := replaced(text[whole[1] :])) is not None:
            return instead
        if not denied(text, whole):
            contents = [text[text.index("{", start) + 1 : end - 1].strip() for start, end in chosen]
            return _together(contents, [text[a[1] : b[0]] for a, b in itertools.pairwise(chosen)])
        return ""
    return None


def _boxes(text: str) -> list[Span]:
    r"""Returns spans from ``\boxed`` to its closing brace."""
    spans: list[Span] = []
    open_braces: list[Span | None] = []  # where a box and its content start; None for any other brace
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None and text[start[1] : match.start()].strip() and not (spans and spans[-1][0] > start[0]):
                spans.append((start[0], match.end()))
        elif token == "{":
            open_braces.append(None)
        elif token.endswith("{") and len(token) > 2:
            open_braces.append(match.span())
    return spans[-TRIES:]


def _side_by_side(found: Sequence[Place], text: str, span: Callable[[Place], Span]) -> Sequence[Place]:
    """Returns the last ones, as long as nothing between them separates answers."""
    first = len(found) - 1
    while first > 0:
        between = text[span(found[first - 1])[1] : span(found[first])[0]]
        if len(between) > 80 or not _BETWEEN.fullmatch(between):
            break
        first -= 1
    return found[max(0, first) :]


def _together(contents: Sequence[str], between: Sequence[str] = ()) -> str:
    """Returns several answers as one of several parts; the same one twice is one."""
    if len({"".join(content.split()) for content in contents}) == 1:
        return contents[0]
    joint = " or " if any("or" in each.split() or "或" in each for each in between) else ", "
    return joint.join(contents)


def hashes(text: str, *, prose: bool = False) -> str | None:
    """Returns the text after the last ``####`` that is an answer, and those beside it: its own line at the end, or else an
    expression.

    A Markdown heading ("#### Step 3: add them") is neither.
    """
    if "####" not in text:
        return None
    matches = [match for match in list(_HASHES.finditer(text))[-TRIES:] if match[1].strip()]
    while matches:
        match = matches[-1]
        line = match[1].strip()
        at_end = not text[match.end() :].strip()
        if at_end or (has_mathematics(line) and (not is_prose(line) or _is_short(line))):
            if (instead := replaced(text[match.end() :], prose=prose)) is not None:
                return instead
            chosen = _side_by_side(matches, text, lambda match: match.span())
            return _together([each[1].strip() for each in chosen])
        matches.pop()
    return None


def _is_short(line: str) -> bool:
    """Returns True for a number and a few words, not a heading: "72 apples"."""
    return bool(ITEM.match(line)) and len(line.split()) <= 4
