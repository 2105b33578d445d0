"""Reads what a sentence says of a value: asserts it, leaves it in doubt, takes it back, or gives another one instead.

One rule for every place: a box, a tag, ``####``, "answer is" and the last number differ only in where they begin.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import pairwise

from rlhf_plugin_math_verifier import units, vocabulary
from rlhf_plugin_math_verifier.phrases import (
    ADJUNCT,
    BESIDES,
    CHOSEN,
    CONCLUSION,
    CONTRAST,
    COPULA,
    CORRECTED,
    DENIED_AFTER,
    DENIED_BEFORE,
    DENIED_CLAUSE,
    DOUBTED,
    DOUBTED_AFTER,
    GUESSED_AFTER,
    GUESSED_BEFORE,
    NOT_DOUBTED,
    PHRASE_END,
    REASON,
    REFERENCE,
    REPLACED,
    RETRACTED,
    SIDE_CLAUSE,
    UNSAID,
    WITHDRAWN,
    YES_OR_NO,
)

Span = tuple[int, int]
SIGHT = 160
"""Characters beside a value that may change it."""
MAX_WORDS = 8
"""Maximum words of a text that is taken whole."""

SENTENCE_END = re.compile(r"[.!?](?=[\s*\"')](?!\s*(?:but|or|and)\b)|$)|[。？！]|\n")
# Dollars pair up as in pandoc: no space inside, no digit after, so that "$5 and $6" is money.
_LATEX = (
    r"\$\$(?P<display>(?:(?!\$\$).){1,1000})\$\$|\\\[(?P<brackets>(?:(?!\\\[|\\\]).){1,1000})\\\]"
    r"|\\\((?P<inline>(?:(?!\\\(|\\\)).){1,500})\\\)"
    r"|(?<![\\$\w])\$(?P<dollars>(?![\s$])(?:[^$\n\\]|\\.){1,500}(?<!\s))\$(?![0-9])"
    r"|(?P<bare>(?:(?<![\w)])[-+−–] ?)?(?<![0-9.])[0-9]{0,20}\\(?:[dtc]?frac\s*(?:\{[^{}\n]{1,60}\}\s*\{[^{}\n]{1,60}\}|[0-9]{2})"
    r"|sqrt\s*\{[^{}\n]{1,60}\}|pi\b))"
)
_PLAIN = (
    r"(?P<plain>(?<![A-Za-z0-9_\\])(?<![0-9][.,])(?:(?<![\w)\]}])[-+−–] ?)?(?:\\?[$€£¥₹₩₽]\s?)?(?:(?<![\w)\]}])-)?"
    r"(?:[0-9]{1,9}[\s-](?=[0-9]{1,9}/[0-9]))?"
    r"(?:[0-9]{1,3}(?:\s[0-9]{3})+(?![0-9])|[0-9]+(?:[.,][0-9]+)*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,2}(?![\w]))?"
    r"(?::[0-9]+)*(?:\s?/\s?[0-9]+)?(?:\s?\\?%|\s?percent\b)?)"
)
ITEM = re.compile(f"{_LATEX}|{_PLAIN}", re.DOTALL)
_OPERATORS = re.compile(r"(?:[\s()+\-−±*/×÷·^=≈πx]|\\times|\\cdot|\\div)+")
_LISTED = re.compile(r"\s*(?:,|;|,?\s*\b(?:and|or|y|et|und|oder|ou|и|или)\b|和|与|、|或|,)\s*", re.IGNORECASE)
_COEFFICIENT = re.compile(r"(?<![A-Za-z0-9^_.])[0-9]+\s?[a-z]\s*=\s*\Z")
"""The left side of an equation that is not solved yet: ``2x = 18``."""
_NAMED_GAP = re.compile(r"\s*(?:,|;|,?\s*\b(?:and|or)\b)\s*[A-Za-z]{1,12}(?:_\{?\w\}?)?\s*=\s*")
_NAME_BEFORE = re.compile(r"(?<![\w\\])[A-Za-z]{1,12}(?:_\{?\w\}?)?\s*=\s*\Z")
_PART_OF = re.compile(
    r"(?:%|percent)[\s$)\\]*\s*of\s+[$(]*[-0-9]|\b(?:more|less|fewer|[a-z]+er|times)\b[^.;,]{0,20}\bthan\b[^.;]{0,40}[0-9]"
    r"|\btimes\s+as\b[^.;]{0,40}[0-9]"
)
_NAME = re.compile(r"(?:\$|\\\()\s*\\?[A-Za-z]{1,3}(?:_\{?\w\}?)?(?:\([A-Za-z]\))?\s*(?:\$|\\\))")
_NOUN_OF = re.compile(r"\s*[a-z]+\s+of\s*")
_PAIRED = re.compile(r"\s*(?:out\s+of|to|by|in|and)\s*")
_UNIT = re.compile(r"\s*([A-Za-z]{1,12})\.?,?\s+(?:and\s+)?")
_EQUALS = re.compile(r"=[\s(]*\Z")
_PROSE = re.compile(
    r"(?<![\\A-Za-z])(?:[A-Za-z]{3,}|(?:of|it|is|in|to|as|so|we|if|by|at|on|an)\b)|[\u00c0-\u024f\u0400-\u04ff\u0590-\U0001ffff]{2,}"
)
_WRAPPED = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}")
_MATHEMATICAL_WORDS = frozenset(
    str.split(
        "sin cos tan sec csc cot log exp sqrt mod gcd lcm max min and infinity infty alpha beta gamma delta epsilon theta lambda"
        " sigma phi psi omega"
    )
)
_CLAUSE_END = re.compile(r"(?<![A-Za-z])[.!;\n。！]|[!;\n。！]|\.\s")
_CLAUSES = re.compile(r"[,;:，；：]|\bbut\b")
_CLAUSE_STARTS = re.compile(r"[,;:—–]\s*|\bbut\b\s*|\bbecause\b\s*")
_ANSWERED = re.compile(r"\A(?:no|nope|yes)\s?[:,;-]\s*(?=[-$\\\d(])", re.IGNORECASE)
"""An answer to a question that the text asks itself: "41? No: 42"."""
_DENIAL = re.compile(r"(?:\w+ly\s+)?(?:not|never)\b", re.IGNORECASE)
_CHOICE_WITH_REASON = re.compile(
    r"\W{0,4}([A-HJ])(?!\w)\W{0,4}\s(?:because|since|(?:(?:and|but)\s+)?(?:not|rather\s+than|instead\s+of)\s+[(*$]{0,3}[A-J](?!\w))"
    r"|\W{0,4}([A-HJ])(?!\w)\W{0,4};\s",
)
# "A. Actually B": the choice is taken back by what ends in another. Not so "A. But B is close".
_TAKEN_BACK = re.compile(r"\W{0,4}[A-J]\W{1,6}\s.{0,80}(?<!\w)[A-HJ]\W*$")


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer that a text gives. Empty ``text``: it gives none, or takes back the one that it gave."""

    text: str
    doubt: bool = False
    """True if words leave it open, or if something beside it is unread: never right."""
    rivals: tuple[str, ...] = ()
    """Other values of the text that no rule rules out: where one of them is the label, the claim is not wrong."""
    against: str = ""
    """A value that the text announces later: where it is another one, the claim is not right."""


NONE = Claim("")


def asserted(sentence: str, after: str = "", *, prose: bool = False, announced: bool = True) -> Claim:
    """Returns the claim of a sentence, which begins where its announcement ends; ``after`` follows the sentence."""
    sentence = sentence.strip().strip(" \t*_`\"'→⇒").strip()
    if not prose:
        sentence = _ANSWERED.sub("", sentence)
    if (instead := replaced(after, prose=prose)) is not None:
        return instead
    if RETRACTED.match(after):
        return NONE
    if not prose and (later := withdrawn(after)) is not None:
        return later
    denial = _DENIAL.match(sentence)
    if denial and (right := CORRECTED.match(sentence)) and right.end() < len(sentence):
        return asserted(sentence[right.end() :], prose=prose)
    if prose:
        return _words(sentence)
    if denial:
        return NONE
    items = values(sentence)
    if not items:
        return Claim(sentence)
    runs = _runs(sentence, items)
    for _, end in runs:
        if (instead := replaced(sentence[end:])) is not None and instead.text:
            return replace(instead, rivals=())
    if is_prose(sentence) and withdrawn(sentence[runs[-1][1] : runs[-1][1] + 1000]) is not None:
        return NONE
    if not is_prose(sentence):
        found = standing(sentence[: runs[0][0]], sentence[runs[-1][1] :])
        return NONE if found == "denied" else Claim(sentence, found == "doubt")
    return _core(sentence, runs, announced=announced)


def values(sentence: str) -> list[re.Match[str]]:
    """Returns the values in a sentence; a name, such as ``$x$``, is one only if there is no other."""
    items = [item for item in list(ITEM.finditer(sentence))[:40] if not REFERENCE.search(sentence, 0, item.start())]
    return [item for item in items if not _NAME.fullmatch(item.group())] or items


def _words(sentence: str) -> Claim:
    if (said := YES_OR_NO.match(sentence)) and not YES_OR_NO.search(sentence, said.end()):
        return Claim(said[1])
    if choice := _CHOICE_WITH_REASON.match(sentence):
        return Claim(choice[1] or choice[2])
    return Claim(sentence)


def _runs(sentence: str, items: list[re.Match[str]]) -> list[Span]:
    """Joins values with operators between them, and lists: "3 + 2 = 5", "2, 3 and 4"."""
    runs = [items[0].span()]
    for one, other in pairwise(items):
        gap = sentence[one.end() : other.start()]
        signed = not gap.strip() and other.group()[0] in "+-−–"  # 50 + 3
        operators = _OPERATORS.fullmatch(gap) and gap.strip(" ()\n")
        compound = (unit := _UNIT.fullmatch(gap)) and unit[1] != "in" and units.known(unit[1])  # "2 hours and 30 minutes"
        if signed or operators or compound or _LISTED.fullmatch(gap) or _NAMED_GAP.fullmatch(gap):
            runs[-1] = (runs[-1][0], other.end())
        else:
            runs.append(other.span())
    return [_widened(sentence, run) for run in runs]


def _widened(sentence: str, run: Span) -> Span:
    """Returns a value with the brackets around it."""
    start, end = run
    if _NAMED_GAP.search(sentence, start, end) and (name := _NAME_BEFORE.search(sentence, 0, start)):
        return name.start(), end
    opening, closing = sentence[start - 1 : start], sentence[end : end + 1]
    if (start and opening + closing in ("{}", "[]", "[)", "(]")) or (
        opening + closing == "()" and set(",;") & set(sentence[start:end])
    ):
        start -= 1 + (sentence[start - 2 : start - 1] == "\\")
        return start, end + 1
    return run


def _result(sentence: str, run: Span) -> Span:
    """Returns what is behind the last ``=`` of a sum, if it is one value: "3 + 2 = 5"."""
    if _NAMED_GAP.search(sentence, *run):
        return run
    start = sentence.rfind("=", *run) + 1
    value = ITEM.match(sentence, start + len(sentence[start:]) - len(sentence[start:].lstrip(" (")), run[1]) if start else None
    return value.span() if value and value.end() == run[1] else run


def _core(sentence: str, runs: list[Span], *, announced: bool) -> Claim:
    """Chooses the value that the sentence is about: the result of a sum, or the one that no preposition and no side clause has,
    in the clause that concludes.
    """
    begin = 0
    if not announced:
        starts = [match.end() for match in CONCLUSION.finditer(sentence, 0, runs[-1][0])]
        if side := SIDE_CLAUSE.match(sentence, 0, runs[-1][0]):
            starts.append(side.end())
        starts += [match.end() for match in CONTRAST.finditer(sentence, 0, runs[-1][0])]
        begin = max((start for start in starts if start <= runs[-1][0]), default=0)
    core: list[Span] = []
    beside: list[Span] = []
    results: list[Span] = []
    for index, run in enumerate(runs):
        before = sentence[max(begin if run[0] >= begin else 0, runs[index - 1][1] if index else 0) : run[0]]
        is_result = "=" in sentence[run[0] : run[1]] or _EQUALS.search(before) is not None
        value = _result(sentence, run)
        if standing(sentence[begin if run[0] >= begin else 0 : run[0]], sentence[run[1] : run[1] + SIGHT]) == "denied":
            continue
        if run[0] < begin or (core and REASON.search(sentence, core[0][1], run[0])):
            beside.append(value)
        elif is_result:
            beside += core
            core = [value]
            results.append(value)
        elif (core or index + 1 < len(runs)) and (ADJUNCT.search(before) or (index and _NOUN_OF.fullmatch(before))):
            beside.append(value)
        else:
            core.append(value)
    if not core and not beside:
        return NONE
    if announced and core and core[0] == runs[0]:
        doubt = len(core) > 1
        chosen = core[0]
    else:
        doubt = len(core) != 1 and len(core + beside) > 1
        chosen = core[-1] if core else beside[-1]
    if {sentence[start:end] for start, end in core} == {sentence[slice(*chosen)]}:
        doubt = False  # the same value again
    claim = _with_words(
        sentence, chosen, runs, begin if chosen[0] >= begin else 0, announced=announced, result=chosen in results
    )
    doubt = doubt or _COEFFICIENT.search(sentence, 0, chosen[0]) is not None or _PART_OF.search(sentence, chosen[0]) is not None
    others = [sentence[run[0] : run[1]].strip() for run in (*core, *beside) if run != chosen]
    others += [sentence[a[0] : b[1]] for a, b in pairwise(runs) if _PAIRED.fullmatch(sentence[a[1] : b[0]])]  # "3 out of 4"
    if len(core) > 1:
        others.append(", ".join(sentence[slice(*run)] for run in core))
    return replace(claim, doubt=claim.doubt or doubt, rivals=tuple(others))


def _with_words(sentence: str, run: Span, runs: list[Span], begin: int, *, announced: bool, result: bool) -> Claim:
    """Returns a value with the words beside it that may change it."""
    previous = max([other[1] for other in runs if other[1] <= run[0]], default=begin)
    lead, rest = sentence[previous : run[0]], sentence[run[1] :]
    start = run[0]
    words = re.findall(r"[^\W\d_]+(?:'[a-z]+)?", lead)
    if announced and not result and not all(map(_says_nothing, words)):
        start = previous
    elif words and not result and _alters(words):
        start = previous + lead.rfind(words[-1])
    if (end := PHRASE_END.search(rest)) and DENIED_CLAUSE.match(rest, end.start()):
        return NONE
    phrase = rest[: end.start()] if end else rest
    nearest = min([other[0] for other in runs if other[0] >= run[1]], default=len(sentence))
    phrase = phrase[: max(0, nearest - run[1])].rstrip(" (,;")
    phrase = "" if COPULA.fullmatch(phrase) else phrase
    doubt = (
        standing(sentence[begin : run[0]], rest) != "" or DOUBTED_AFTER.search(BESIDES.sub("", rest[len(phrase) :])) is not None
    )
    return Claim(_content(sentence[start : run[0]], sentence[run[0] : run[1]], phrase), doubt)


def _says_nothing(word: str) -> bool:
    """Returns True for a word before a value that does not change it: "the answer is that she has 5 apples"."""
    if vocabulary.is_script(word):
        return not vocabulary.script_changes(word)
    return len(word) == 1 or word.casefold() in vocabulary.LEADS or word.casefold() in vocabulary.CLAUSE_LEADS


def _alters(words: list[str]) -> bool:
    """Returns True if the word right before a value changes it: "negative 5", "half of 5"."""
    kept = [word for word in words if word.casefold() not in ("of", "the", "a", "an")]
    if not kept:
        return False
    last = kept[-1]
    if vocabulary.is_script(last):
        return vocabulary.script_changes(last)
    return last.casefold() not in UNSAID and vocabulary.changes(last)


def _content(lead: str, value: str, phrase: str) -> str:
    match = ITEM.fullmatch(value)
    inside = next(group for group in match.groups() if group is not None).strip() if match else value
    return f"{lead}{inside}{phrase}".strip()


def standing(before: str, after: str) -> str:
    """Returns ``denied`` if the words beside a value take it back or make a bound of it, ``doubt`` if they leave it open."""
    if DENIED_BEFORE.search(before) or DENIED_AFTER.match(after):
        return "denied"
    if GUESSED_BEFORE.search(before[-SIGHT:]) or GUESSED_AFTER.search(_CLAUSE_END.split(after[:SIGHT], 1)[0]):
        return "doubt"
    return ""


def around(text: str, start: int, end: int, *, prose: bool = False) -> str | Claim:
    """Returns the standing of a marked value in its sentence, or the claim that the text gives instead of it."""
    after = text[end : end + 1000]
    if (instead := replaced(after, prose=prose)) is not None:
        return instead
    if not prose and (later := withdrawn(after)) is not None:
        return later
    before = sentence_before(text, start)
    found = standing(before, after[:SIGHT]) or ("doubt" if DOUBTED.search(last_clause(before)) else "")
    ended = re.match(r"[\s$*)\]\\]{0,6}[.!]", after)
    return "denied" if ended and RETRACTED.match(after, ended.end()) else found


def replaced(after: str, *, prose: bool = False) -> Claim | None:
    """Returns the claim that the text after an answer gives instead: "Wait, no, it is 43"; None if there is none."""
    instead = REPLACED.match(after[:1000])
    if instead is None:
        return None
    rest = after[instead.end() : instead.end() + 1000]
    if (choice := CHOSEN.match(rest)) is not None:
        return Claim(choice[1])
    end = SENTENCE_END.search(rest)
    return asserted(rest[: end.start()] if end else rest, rest[end.end() :] if end else "", prose=prose)


def withdrawn(after: str) -> Claim | None:
    """Returns what is left of an answer that one of the next clauses takes back: a value after that, which stays doubtful."""
    begin = len(after) - len(after.lstrip(" \n.!*$)]"))
    for _ in range(4):
        end = SENTENCE_END.search(after, begin)
        stop = end.end() if end else len(after)
        sentence = after[begin:stop]
        starts = [0, *(match.end() for match in _CLAUSE_STARTS.finditer(sentence))]
        if any(WITHDRAWN.match(sentence, start) for start in starts):
            later = list(ITEM.finditer(after, stop))[-1:]
            return Claim(later[0].group().strip(), doubt=True) if later else NONE
        if end is None or ITEM.search(sentence):
            return None
        begin = stop + len(after[stop:]) - len(after[stop:].lstrip(" \n.!*"))
    return None


_SUBJECT = re.compile(
    r"(?:the|our|its|their|his|her|this|what)\b(?:(?!\s(?:is|are|was|were|equals)\s)[^.;:=\n]){1,200}"
    r"\s(?:is|are|was|were|equals)\s+(?=[-+$\\\d(\[])(?![^\n]*\s(?:is|are|was|were|equals)\s)",
    re.IGNORECASE,
)
"""What a value is of, as in "the largest number that could be there is", before the value."""
_CONDITION = re.compile(
    r"\b(?:when|if|where|given|while|because|since|unless|whose|which|suppose\w*|not|never|no)\b|n't", re.IGNORECASE
)


def stated(rest: str, *, prose: bool) -> Claim | None:
    """Returns the claim after an announcement, whose sentence ``rest`` continues; None if it announces nothing."""
    if rest.startswith(("$$", r"\[")) and (display := ITEM.match(rest)):
        return Claim(_content("", display.group(), ""))
    line = rest.partition("\n")[0]
    choice = CHOSEN.match(line) if prose else None
    if choice and (instead := replaced(rest[choice.end() :], prose=prose)) is not None:
        return instead
    end = None if prose and _TAKEN_BACK.match(line) else SENTENCE_END.search(line)
    sentence, after = (line[: end.start()], rest[end.end() :]) if end else (line, rest[len(line) :])
    if not sentence.strip(" \t*_`\"'") or not (prose or _says_something(sentence)):
        return None
    subject = None if prose else _SUBJECT.match(sentence)
    value = sentence[subject.end() if subject and not _CONDITION.search(subject.group()) else 0 :]
    claim = asserted(value, after, prose=prose)
    if end and end.group() in "?？" and replaced(after, prose=prose) is None:
        return NONE
    if end and end.group() == "!" and line[: end.start()][-1:].isdigit():
        return replace(claim, doubt=True)  # 5! or 5
    if claim.text and REASON.search(sentence) is None and not prose and GUESSED_BEFORE.search(value):
        return replace(claim, doubt=True)
    return claim


_REMARKS = frozenset(
    str.split(
        "correct right wrong incorrect verified confirmed reasonable valid simple clear obvious below above follows found given"
        " obtained computed calculated boxed this that thus"
    )
)


def _says_something(sentence: str) -> bool:
    """Returns True for an answer, such as "x + y", "eighteen" and "unknown", and not for a remark on it, such as "correct"."""
    if has_mathematics(sentence) or not is_prose(sentence):
        return True
    words = sentence.casefold().split()
    return vocabulary.counted(words) is not None or (len(words) <= 3 and not _REMARKS & set(words))


def last_clause(before: str) -> str:
    return _CLAUSES.split(NOT_DOUBTED.sub("", before))[-1]


def sentence_before(text: str, position: int) -> str:
    before = text[max(0, position - SIGHT) : position]
    ends = [match.end() for match in re.finditer(r"[.!?](?=\s)|[\n。！？]", before)]
    return before[ends[-1] :] if ends else before


def has_mathematics(text: str) -> bool:
    return any(character.isdigit() or character in "\\$∞π√" for character in text)


def is_prose(text: str) -> bool:
    return any(match.group().casefold() not in _MATHEMATICAL_WORDS for match in _PROSE.finditer(_WRAPPED.sub("", text)))
