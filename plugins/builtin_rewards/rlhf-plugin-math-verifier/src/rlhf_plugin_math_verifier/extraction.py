"""Finds the answer in a text: in ``\\boxed{}``, after ``####``, after "answer is", or the last number or LaTeX expression.

Every search is linear in the text, up to a constant: the text is a model's, and may be anything.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rlhf_plugin_math_verifier.plain import MATHEMATICAL_WORDS, number

Form = Literal["any", "boxed", "hashes"]

_BRACES = re.compile(r"\\{1,4}(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*([^\n]*)")
_STATED = re.compile(
    r"\banswers?\b(?:[ \t]+(?:to|for|of)\b[^.\n:=]{0,80}?)?[\s*_]{0,10}"
    r"(?:\b(?:is|are|equals|(?:would|will|should|must) be)\b|[:=])[\s*_:=]{0,10}",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?](?:[\s*](?!\s*(?:but|or|and)\b)|$)")
# "A. Actually B": the choice is taken back by what ends in another. Not so "A. But B is close".
_TAKEN_BACK = re.compile(r"\W{0,4}[A-J]\W{1,6}\s.{0,80}(?<!\w)[A-HJ]\W*$")
# Dollars pair up as in pandoc: no space inside, no digit after, so that "$5 and $6" is money.
_LATEX = (
    r"\$\$(?P<display>.{1,1000}?)\$\$|\\\[(?P<brackets>.{1,1000}?)\\\]|\\\((?P<inline>.{1,500}?)\\\)"
    r"|(?<![\\$\w])\$(?P<dollars>(?![\s$])(?:[^$\n\\]|\\.){1,500}(?<!\s))\$(?![0-9])"
    r"|(?P<bare>(?:(?<![\w)])[-+−])?(?<![0-9.])[0-9]{0,20}\\(?:[dtc]?frac\s*(?:\{[^{}\n]{1,60}\}\s*\{[^{}\n]{1,60}\}|[0-9]{2})"
    r"|sqrt\s*\{[^{}\n]{1,60}\}|pi\b))"
)
_PLAIN = (
    r"(?P<plain>(?<!\w)(?<![0-9]\.)(?:(?<![\w)\]}])[-+−])?(?:\\?[$€£¥₹]\s?)?(?:(?<![\w)\]}])-)?(?:[0-9]{1,9}\s(?=[0-9]{1,9}/[0-9]))?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,2}(?![\w]))?"
    r"(?:\s?/\s?[0-9]+)?(?:\s?\\?%|\s?percent\b)?)"
)
_ITEM = re.compile(f"{_LATEX}|{_PLAIN}", re.DOTALL)
_TO_EQUALS = re.compile(r"[\s0-9.,+\-−*/×÷^()$%]*=\s*")
_PROSE = re.compile(r"(?<![\\A-Za-z])(?:[A-Za-z]{3,}|(?:of|it|is|in|to|as|so|we|if|by|at|on|an)\b)")
_TRIES = 20  # of the last matches, so that a text that repeats itself costs no more


@dataclass(frozen=True, slots=True)
class Answer:
    """What a text gives as its answer, and how: ``last`` is the only form that nobody marked as the answer."""

    text: str
    form: Literal["boxed", "hashes", "stated", "last"]

    @property
    def marked(self) -> bool:
        return self.form != "last"


def extract(text: str, form: Form = "any", *, prose: bool = False) -> Answer | None:
    """The answer, the last of the first form that is there: boxed, ``####``, "answer is", last number or LaTeX.

    ``prose``: the label is words, so an answer of words will do.
    """
    if form != "hashes" and (found := boxed(text)) is not None:
        return Answer(found, "boxed")
    if form != "boxed" and (found := hashes(text, prose=prose)) is not None:
        return Answer(found, "hashes")
    if form != "any":
        return None
    if (found := stated(text, prose=prose)) is not None:
        return Answer(found, "stated")
    if not prose and (found := last(text)) is not None:
        return Answer(found, "last")
    return None


def boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{...}`` that is closed and not empty; of nested ones, the innermost."""
    best = None
    open_braces: list[int | None] = []  # where a box's content starts; None for any other brace
    for match in _BRACES.finditer(text) if "boxed" in text or "fbox" in text else ():
        token = match.group()
        if token == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None and (best is None or start > best[0]) and text[start : match.start()].strip():
                best = (start, match.start())
        elif token == "{":
            open_braces.append(None)
        elif token.endswith("{") and len(token) > 2:
            open_braces.append(match.end())
    return text[best[0] : best[1]].strip() if best else None


def hashes(text: str, *, prose: bool = False) -> str | None:
    """What follows the last ``####`` that is an answer: a line of its own at the end, or else a lone expression.

    A Markdown heading ("#### Step 3: add them") is neither.
    """
    if "####" not in text:
        return None
    for match in reversed(list(_HASHES.finditer(text))[-_TRIES:]):
        line = match.group(1).strip()
        if not line:
            continue
        if not text[match.end() :].strip():
            return line if prose else _expression(line)
        if number(line) is not None or (_has_mathematics(line) and not _is_prose(line)):
            return line
    return None


def stated(text: str, *, prose: bool = False) -> str | None:
    """What follows the last "answer is" (or "Answer:") that goes on to an expression; with ``prose``, to anything."""
    for match in reversed(list(_STATED.finditer(text))[-_TRIES:]):
        rest = text[match.end() : match.end() + 1000]
        if prose:
            line = rest.partition("\n")[0]
            sentence = line if _TAKEN_BACK.match(line) else _SENTENCE_END.split(line, maxsplit=1)[0]
            found: str | None = sentence.strip().strip(" \t*_`\"'").strip() or None
        elif rest.startswith(("$$", r"\[")):  # a display may span lines
            found = _expression(rest)
        else:
            found = _expression(rest.partition("\n")[0])
        if found is not None:
            return found
    return None


def last(text: str) -> str | None:
    """The last number or LaTeX expression."""
    contents = deque(filter(None, map(_content, _ITEM.finditer(text))), maxlen=1)
    return contents[0] if contents else None


def _expression(line: str) -> str | None:
    """The line where all of it is an expression, otherwise the first number or LaTeX expression in it ("5 apples": 5)."""
    sentence = _SENTENCE_END.split(line, maxsplit=1)[0].strip().strip(" \t*_`").strip()
    if sentence and not _is_prose(sentence) and (_has_mathematics(sentence) or len(sentence) <= 20):
        return sentence
    items = _ITEM.finditer(line)
    match = next(items, None)
    while match and (sums := _TO_EQUALS.match(line, match.end())):  # "3 + 2 = 5 apples": 5
        if not (after := _ITEM.match(line, sums.end())):
            break
        match = after
    return (_content(match) or None) if match else None


def _content(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None).strip()


def _has_mathematics(text: str) -> bool:
    return any(character.isdigit() or character in "\\$∞π√" for character in text)


def _is_prose(text: str) -> bool:
    return any(word not in MATHEMATICAL_WORDS for word in _prose_words(text))


def _prose_words(text: str) -> Iterator[str]:
    return (match.group().casefold() for match in _PROSE.finditer(re.sub(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}", "", text)))
