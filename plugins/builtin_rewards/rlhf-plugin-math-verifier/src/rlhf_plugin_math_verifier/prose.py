"""Answers in sentences: after "answer is", or the last number or LaTeX expression; and sentences that take one back."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlhf_plugin_math_verifier import vocabulary
from rlhf_plugin_math_verifier.statements import (
    ANNOUNCED,
    BESIDES,
    CORRECTED,
    DENIED_AFTER,
    DENIED_BEFORE,
    DENIED_CLAUSE,
    DOUBTED,
    DOUBTED_AFTER,
    GUESSED,
    NOT_DOUBTED,
    OR,
    PHRASE_END,
    REPLACED,
    RETRACTED,
)

Span = tuple[int, int]
TRIES = 20
"""Maximum number of last matches that are tried, so that a text that repeats itself costs no more."""

_SENTENCE_END = re.compile(r"[.!?](?=[\s*](?!\s*(?:but|or|and)\b)|$)|[。？！]")
# "A. Actually B": the choice is taken back by what ends in another. Not so "A. But B is close".
_TAKEN_BACK = re.compile(r"\W{0,4}[A-J]\W{1,6}\s.{0,80}(?<!\w)[A-HJ]\W*$")
# Dollars pair up as in pandoc: no space inside, no digit after, so that "$5 and $6" is money.
_LATEX = (
    r"\$\$(?P<display>.{1,1000}?)\$\$|\\\[(?P<brackets>.{1,1000}?)\\\]|\\\((?P<inline>.{1,500}?)\\\)"
    r"|(?<![\\$\w])\$(?P<dollars>(?![\s$])(?:[^$\n\\]|\\.){1,500}(?<!\s))\$(?![0-9])"
    r"|(?P<bare>(?:(?<![\w)])[-+−–] ?)?(?<![0-9.])[0-9]{0,20}\\(?:[dtc]?frac\s*(?:\{[^{}\n]{1,60}\}\s*\{[^{}\n]{1,60}\}|[0-9]{2})"
    r"|sqrt\s*\{[^{}\n]{1,60}\}|pi\b))"
)
_PLAIN = (
    r"(?P<plain>(?<![A-Za-z0-9_\\])(?<![0-9]\.)(?:(?<![\w)\]}])[-+−–] ?)?(?:\\?[$€£¥₹]\s?)?(?:(?<![\w)\]}])-)?"
    r"(?:[0-9]{1,9}\s(?=[0-9]{1,9}/[0-9]))?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,2}(?![\w]))?"
    r"(?::[0-9]+)*(?:\s?/\s?[0-9]+)?(?:\s?\\?%|\s?percent\b)?)"
)
ITEM = re.compile(f"{_LATEX}|{_PLAIN}", re.DOTALL)
_TO_EQUALS = re.compile(r"[\s0-9.,+\-−*/×÷^()$%]*=\s*")
_PROSE = re.compile(r"(?<![\\A-Za-z])(?:[A-Za-z]{3,}|(?:of|it|is|in|to|as|so|we|if|by|at|on|an)\b)")
_WRAPPED = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}")
_MARKERS = re.compile(r"<[/|]?[A-Za-z_][\w|]*>")
_MATHEMATICAL_WORDS = frozenset(
    str.split(
        "sin cos tan sec csc cot log exp sqrt mod gcd lcm max min and infinity infty alpha beta gamma delta epsilon theta lambda"
        " sigma phi psi omega"
    )
)
_CLAUSES = re.compile(r"[,;:，；：]|\bbut\b")
_YES_OR_NO = re.compile(r"\b(yes|no|true|false)\b(?=\s*(?:[,;:.]|(?:because|since|as)\b|\Z))", re.IGNORECASE)
_DENIAL = re.compile(r"(?:\w+ly\s+)?(?:not|never)\b", re.IGNORECASE)
_CHOSEN = re.compile(r"\W{0,4}([A-HJ])(?!\w)(?=\W*(?:\Z|\n|[.!](?:\s|\Z)|is\s+(?:correct|right|the\s)))")
_CHOICE_WITH_REASON = re.compile(
    r"\W{0,4}([A-HJ])(?!\w)\W{0,4}\s(?:because|since|(?:(?:and|but)\s+)?(?:not|rather\s+than|instead\s+of)\s+[(*$]{0,3}[A-J](?!\w))",
)
_REMARKS = frozenset(
    str.split(
        "correct right wrong incorrect verified confirmed reasonable valid simple clear obvious below above follows found given"
        " obtained computed calculated boxed this that thus"
    )
)
_SIGHT = 100  # characters of a sentence that may take an answer back


def stated(text: str, *, prose: bool = False) -> str | None:
    """Returns the text after the last "answer is" (or "Answer:") that is followed by an expression; with ``prose``, by
    anything.

    Empty if the text takes it back and gives no other.
    """
    refused: list[str] = []
    for match in reversed(list(ANNOUNCED.finditer(text))[-TRIES:]):
        rest = text[match.end() : match.end() + 1000]
        clause = _CLAUSES.split(NOT_DOUBTED.sub("", _sentence_before(text, match.start())))[-1]
        found = "" if DOUBTED.search(clause) else _stated(rest, prose=prose)
        if found and GUESSED.search(clause):
            found = f"maybe {found}"
        if found == "":
            refused.append(_key(_first_line(rest)))
        elif found is not None and _key(found) not in refused:
            return found
    return "" if refused and not prose else None


def replaced(after: str, *, prose: bool = False) -> str | None:
    """Returns the answer that the text after an answer gives instead: "Wait, no, it is 43"; None if there is none."""
    instead = REPLACED.match(after[:1000])
    if instead is None:
        return None
    if (choice := _CHOSEN.match(after, instead.end())) is not None:
        return choice[1]
    return _stated(after[instead.end() : instead.end() + 1000], prose=prose)


def _stated(rest: str, *, prose: bool) -> str | None:
    if rest.startswith(("$$", r"\[")) and (display := ITEM.match(rest)):  # it may span lines
        return _content(display)
    line = _first_line(rest)
    choice = _CHOSEN.match(line) if prose else None
    if choice and (instead := replaced(rest[choice.end() :], prose=prose)) is not None:
        return instead
    taken_back = prose and _TAKEN_BACK.match(line)
    end = None if taken_back else _SENTENCE_END.search(line)
    sentence, after = (line[: end.start()], rest[end.end() :]) if end else (line, rest[len(line) :])
    asked = end is not None and end.group() in "?？"
    if end and end.group() == "!" and line[: end.start()][-1:].isdigit():
        sentence = f"maybe {sentence}"  # 5! or 5
    sentence = sentence.strip().strip(" \t*_`\"'").strip()
    if not sentence or not (prose or _says_something(sentence)):
        return None
    if (instead := replaced(after, prose=prose)) is not None:
        return instead
    if asked or RETRACTED.match(after):
        return ""
    return _clause(sentence, prose=prose)


def _says_something(sentence: str) -> bool:
    """Returns True for an answer, such as "x + y", "eighteen" and "unknown", and not for a remark on it, such as "correct" and
    "obtained as follows".
    """
    if has_mathematics(sentence) or not is_prose(sentence):
        return True
    words = sentence.casefold().split()
    return vocabulary.counted(words) is not None or (len(words) <= 2 and not _REMARKS & set(words))


def _clause(sentence: str, *, prose: bool) -> str:
    """Returns the answer in a sentence, with everything that may change it; empty if it is denied."""
    first = ITEM.search(sentence)
    denial = _DENIAL.match(sentence)
    if denial and (right := CORRECTED.match(sentence)) and right.end() < len(sentence):
        return _clause(sentence[right.end() :], prose=prose)
    if denial and not prose:
        return ""
    if prose and (said := _YES_OR_NO.match(sentence)) and not _YES_OR_NO.search(sentence, said.end()):
        return said[1]
    if prose and (choice := _CHOICE_WITH_REASON.match(sentence)):
        return choice[1]
    if first is None or prose:
        return sentence
    lead = sentence[: first.start()]
    if DENIED_BEFORE.search(lead):
        return ""
    if not is_prose(sentence):
        return sentence
    if not all(map(_says_nothing, re.findall(r"[^\W\d_]+", lead))):
        return sentence  # "negative 5"
    start = len(lead) if is_prose(lead) else 0  # "she has 5 apples", but "x = 5 apples"
    while sums := _TO_EQUALS.match(sentence, first.end()):  # "3 + 2 = 5 apples": 5 apples
        after = ITEM.match(sentence, sums.end())
        if after is None:
            break
        first, start = after, after.start()
    rest = sentence[first.end() :]
    phrase = _phrase(rest)
    if phrase is None:
        return ""
    besides = BESIDES.sub("", rest[len(phrase) :])
    doubt = "maybe " if DOUBTED_AFTER.search(besides) or ITEM.search(besides) else ""
    return doubt + sentence[start : first.end()] + phrase


def _says_nothing(word: str) -> bool:
    """Returns True for a word before a number that does not change it: "she has 5 apples"."""
    if vocabulary.is_script(word):
        return not vocabulary.script_changes(word)
    return len(word) == 1 or word.casefold() in vocabulary.LEADS or word.casefold() in vocabulary.CLAUSE_LEADS


def _phrase(tail: str) -> str | None:
    """Returns the words beside a number that may change it, up to where the sentence goes on; None if it goes on to deny the
    number.
    """
    end = PHRASE_END.search(tail)
    if end is None:
        return tail
    return None if DENIED_CLAUSE.match(tail, end.start()) else tail[: end.start()]


def last(text: str) -> str | None:
    """Returns the last number or LaTeX expression that its sentence does not take back, with the words after it."""
    refused: list[str] = []
    for match in reversed(_last_items(text)):
        content = _content(match)
        if not content:
            continue
        phrase = _phrase(_sentence_after(text, match.end()))
        if phrase is None or content in refused or denied(text, match.span()):
            refused.append(content)
            continue
        before = text[max(0, match.start() - _SIGHT) : match.start()]
        if OR.search(before) and (other := list(ITEM.finditer(before))):
            return f"{_content(other[-1])} or {content}"
        return f"{content}{phrase}".strip()
    return None


def _last_items(text: str) -> list[re.Match[str]]:
    matches: list[re.Match[str]] = []
    for match in ITEM.finditer(text):
        matches.append(match)
        if len(matches) > 2 * TRIES:
            del matches[:TRIES]
    return matches[-TRIES:]


def denied(text: str, span: Span) -> bool:
    """Returns True if the sentence says that this is not the answer, or only a bound of it."""
    before, after = _sentence_before(text, span[0]), text[span[1] : span[1] + _SIGHT]
    if DENIED_BEFORE.search(before) or DENIED_AFTER.match(after):
        return True
    end = re.match(r"[\s$*)\]\\]{0,6}[.!]", after)
    return bool(end and RETRACTED.match(after, end.end()))


def _sentence_before(text: str, position: int) -> str:
    before = _MARKERS.sub(" ", text[max(0, position - _SIGHT) : position])
    ends = [match.end() for match in re.finditer(r"[.!?](?=\s)|[\n。！？]", before)]
    return before[ends[-1] :] if ends else before


def _sentence_after(text: str, position: int) -> str:
    tail = text[position : position + _SIGHT]
    end = _SENTENCE_END.search(tail)
    return _first_line(tail[: end.start()] if end else tail)


def _key(text: str) -> str:
    """Returns the part of a statement that another one may deny."""
    match = ITEM.search(text)
    return _content(match) if match else text.strip(" .*!?").casefold()


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _content(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None).strip()


def has_mathematics(text: str) -> bool:
    return any(character.isdigit() or character in "\\$∞π√" for character in text)


def is_prose(text: str) -> bool:
    return any(word not in _MATHEMATICAL_WORDS for word in _prose_words(text))


def _prose_words(text: str) -> Iterator[str]:
    return (match.group().casefold() for match in _PROSE.finditer(_WRAPPED.sub("", text)))
