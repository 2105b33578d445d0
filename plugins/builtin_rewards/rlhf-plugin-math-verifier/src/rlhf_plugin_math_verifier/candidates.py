"""Places where a text may have its answer: tags and JSON, ``\\boxed{}``, ``####``, "answer is", the last sentence with a value.

The strongest place that has one decides. A weaker place, or an earlier value of the same place, is a rival: where it is the
label, the answer is not wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from rlhf_plugin_math_verifier import vocabulary
from rlhf_plugin_math_verifier.claims import (
    ITEM,
    MAX_WORDS,
    NONE,
    SENTENCE_END,
    SIGHT,
    Claim,
    around,
    asserted,
    has_mathematics,
    is_prose,
    last_clause,
    sentence_before,
    standing,
    stated,
    values,
)
from rlhf_plugin_math_verifier.decoration import plain_text, unquoted
from rlhf_plugin_math_verifier.phrases import (
    ANNOUNCED,
    ANSWER_WITH_COMMA,
    BEFORE_WORDS,
    CHOSEN,
    CONCLUSION,
    DECIMAL_COMMA,
    DOUBTED,
    OFFER,
    REFUSED,
    REMARK,
    SUPERSEDED,
    SUPPOSED,
    UNREAL,
    VERB,
    YES_OR_NO,
)

Form = Literal["any", "boxed", "hashes"]
Span = tuple[int, int]
TRIES = 20
"""Maximum number of last places that are tried, so that a text that repeats itself costs no more."""

_BRACES = re.compile(r"\\{1,4}(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"\\boxed\s+(-?[0-9][0-9.,/]*)")
_TAG = re.compile(
    r"[<\[](answer|final_answer|solution)[>\]]((?:(?![<\[](?:answer|final_answer|solution)[>\]]).)*?)(?:[<\[]/\1[>\]]|\Z)",
    re.DOTALL | re.IGNORECASE,
)
_KEY = re.compile(
    r"""(?<=["'])(?:final|correct|the)?[ _-]?(?:answer|result|solution|ans)["']\s*:\s*"""
    r"""("(?:[^"\\\n]|\\.){0,500}"|'(?:[^'\\\n]|\\.){0,500}'|\[[^\[\]\n]{0,500}\]|-?[0-9]+(?:[.,][0-9]+)*(?=\s*[,}\n])|[^,}\n"']{1,100})""",
    re.IGNORECASE,
)
_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*([^\n]*)")
_NAME = r"(?:\\?[A-Za-z](?:_\{?\w+\}?)?(?:\([A-Za-z]\))?\s*(?:=|:|\\in\b)|[A-Za-z]{1,3}\s*=|Part\s*\w:)"
_BETWEEN = re.compile(
    rf"(?:[^\S\n]|\n(?!\s*\n)|[$.,;:&~*]|\\[()\[\],;!\\]|\\q?quad\b|\\text\s*\{{\s*,?\s*(?:and|or)?\s*,?\s*\}}|\b(?:and|or)\b|\([a-z0-9]\)|[和与或、，。；]|{_NAME})*",
)
"""Pattern between values that are parts of one answer."""
_COMMA = re.compile(r"(?<=[0-9]),(?=(?:[0-9]{1,2}|[0-9]{4,})(?![0-9,.]{0,20}[0-9)\]]))")
"""A comma between digits that a language with decimal commas has before the decimals."""
_PAIRS = re.compile(
    r"[A-Za-z]\w{0,20}[ ]?[:=] ?[-+$\\\d./%]{1,20}(?:(?:[,;]| and) ?[A-Za-z]\w{0,20}[ ]?[:=] ?[-+$\\\d./%]{1,20})+"
)
_CONCLUDES = re.compile(r"\s*(?:so|thus|therefore|hence|in\s+total|total|altogether|finally|in\s+conclusion)\b", re.IGNORECASE)
_RESULT = re.compile(
    r"\b(?:so|thus|therefore|hence|finally|total|altogether|in\s+all|answer|result|makes?|gives?|leaves?|left|remain\w*|equals?|ends?\s+up|needs?)\b",
    re.IGNORECASE,
)
_PAUSE = re.compile(r"\A\n*(?:(?:\.{2,}|…)\s*)?")
_OF_THE_WRITER = re.compile(
    r"\b(?:i|information|data|details?|context|answer|attempt|try|guess|undetermined|way|determined|unclear|ill-posed)\b",
    re.IGNORECASE,
)
"""Words by which a refusal is about the answer, and not about one way to it."""
_UNWORKED = re.compile(r"[0-9]\s*(?:[-+*/×·÷]|\\(?:times|cdot|div)\b)\s*[0-9]")
"""A sum that is not worked out, which a text that takes back its last value does not give instead."""
_BINARY = frozenset(["yes", "no", "true", "false"])
_OPPOSED = re.compile(
    r"[\s,;$*—–-]*(?:and\s+|but\s+)?(?:instead\s+of|in\s+place\s+of|rather\s+than|not(?!\s+only)|unlike|as\s+opposed\s+to)\b[^.!?;:\n]{0,60}",
    re.IGNORECASE,
)
"""Words between two values by which the second one is not the answer: "13 instead of the naive 12"."""
_OR = re.compile(r"\b(?:or|oder|ou|или)\b|或")


@dataclass(frozen=True, slots=True)
class Place:
    start: int
    end: int
    content: str


@dataclass(frozen=True, slots=True)
class Found:
    """The claim of a text, and the kind of place; ``last`` is the only one that is not marked as the answer."""

    claim: Claim
    form: Literal["boxed", "tagged", "hashes", "stated", "last"]

    @property
    def marked(self) -> bool:
        return self.form != "last"


def find(text: str, form: Form = "any", *, prose: bool = False, parts: int = 1) -> Found | None:
    """Returns the claim of a folded text. ``prose``: the label is words; ``parts``: it has so many values."""
    text = plain_text(text)
    found = _find(text, form, prose=prose, parts=parts)
    claim = found.claim if found else NONE
    decimals = len(claim.text) <= SIGHT and _COMMA.search(claim.text) and not set("([") & set(claim.text)
    if found and decimals and _has_decimal_commas(text):
        return Found(replace(claim, text=_COMMA.sub(".", claim.text), rivals=(*claim.rivals, claim.text)), found.form)
    return found


def _has_decimal_commas(text: str) -> bool:
    return ANSWER_WITH_COMMA.search(text) is not None or len({word.casefold() for word in DECIMAL_COMMA.findall(text)}) > 1


def _find(text: str, form: Form, *, prose: bool, parts: int) -> Found | None:
    if form == "any" and (claim := _tagged(text, prose=prose, parts=parts)) is not None:
        return Found(claim, "tagged")
    if form != "hashes" and (boxes := box_places(text)):
        claim = _chosen(text, boxes, prose=prose, parts=parts)
        return Found(_against(claim, text, boxes[-1].end, prose=prose, form=form), "boxed")
    if form != "boxed" and (lines := hash_places(text)):
        claim = _chosen(text, lines, prose=prose, parts=parts, lines=True)
        return Found(_against(claim, text, lines[-1].end, prose=prose, form=form), "hashes")
    if form != "any":
        return None
    if (claim := _announced(text, prose=prose, parts=parts)) is not None:
        return Found(claim, "stated")
    whole = text.strip(" .\n")
    if parts > 1 and len(whole) <= SIGHT and _PAIRS.fullmatch(whole):
        return Found(Claim(whole), "last")
    claim = _lines(text, parts) if parts > 1 else None
    claim = claim or _last(text, prose=prose)
    return Found(claim, "last") if claim else None


def _tagged(text: str, *, prose: bool, parts: int) -> Claim | None:
    """Returns the claim in the last tag or value of JSON, and in those beside it."""
    places = []
    if "<" in text or "[" in text:
        for match in list(_TAG.finditer(text))[-TRIES:]:
            inside = match[2].strip()
            found = _find(inside, "any", prose=prose, parts=parts)
            whole = found is None or (not found.marked and len(inside.split()) <= MAX_WORDS)
            if not whole and found is not None and (found.claim.doubt or not found.claim.text):
                return found.claim
            places.append(Place(*match.span(), inside if whole or found is None else found.claim.text))
    if not places and ":" in text and "{" in text:
        places = [Place(*match.span(), _json(match[1])) for match in list(_KEY.finditer(text))[-TRIES:]]
    places = [place for place in places if place.content]
    return _chosen(text, places, prose=prose, parts=parts, words=False) if places else None


def _json(value: str) -> str:
    """Returns the text of a value of JSON, or of a Python dictionary; a list is its values."""
    value = value.strip()
    if value.startswith("'"):
        return value[1:-1].strip()
    try:
        read = json.loads(value)
    except ValueError:
        return value.strip('"')
    text = ", ".join(map(str, read)) if isinstance(read, list) else str(read)
    return (
        value.strip('"') if any(mark in text for mark in "\t\b\f\r\n") else text.strip()
    )  # "\frac" written with one backslash


def box_places(text: str) -> list[Place]:
    r"""Returns the closed ``\boxed{...}`` that are not empty; of nested ones the inner."""
    if "boxed" not in text and "fbox" not in text:
        return []
    places: list[Place] = [Place(*match.span(), match[1]) for match in _BARE_BOX.finditer(text)]
    open_braces: list[Span | None] = []  # where a box and its content start; None for any other brace
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "}":
            opened = open_braces.pop() if open_braces else None
            content = text[opened[1] : match.start()].strip() if opened else ""
            if opened and content and not (places and places[-1].start > opened[0]):
                places.append(Place(opened[0], match.end(), content))
        elif token == "{":
            open_braces.append(None)
        elif token.endswith("{") and len(token) > 2:
            open_braces.append(match.span())
    return places[-TRIES:]


def hash_places(text: str) -> list[Place]:
    """Returns the lines after ``####`` that are an answer: not those of a Markdown heading ("#### Step 3: add them")."""
    if "####" not in text:
        return []
    places = []
    for match in [match for match in list(_HASHES.finditer(text))[-TRIES:] if match[1].strip()]:
        line, at_end = match[1].strip(), not text[match.end() :].strip()
        short = bool(ITEM.match(line)) and len(line.split()) <= 4
        if at_end or (has_mathematics(line) and (not is_prose(line) or short)):
            places.append(Place(match.start(), match.end(), line))
    return places


def _chosen(text: str, places: Sequence[Place], *, prose: bool, parts: int, words: bool = True, lines: bool = False) -> Claim:
    """Returns the claim of the last places of a kind that their sentences do not take back."""
    if 1 < parts == len(places) and len({place.content for place in places}) == parts and not _is_list(places[-1]):
        return Claim(", ".join(place.content for place in places))
    left = list(places)
    denied: list[str] = []
    while left:
        group = _side_by_side(left, text, lines=lines)
        earlier = left[: -len(group)]
        between = text[earlier[-1].end : group[0].start] if earlier else ""
        standing = around(text, group[0].start, group[-1].end, prose=prose) if words else ""
        if isinstance(standing, Claim):
            return standing
        if standing == "denied" or _OPPOSED.fullmatch(between) or group[-1].content in denied:
            denied += [place.content for place in group]
            left = left[: -len(group)]
            continue
        superseded = bool(SUPERSEDED.search(between))
        claim = _content(_together(group, text), prose=prose)
        rivals = () if superseded else tuple(place.content for place in earlier if place.content not in denied)[-3:]
        return replace(claim, doubt=claim.doubt or standing == "doubt", rivals=(*claim.rivals, *rivals))
    return NONE


def _is_list(place: Place) -> bool:
    return "," in place.content or ";" in place.content


def _content(content: str, *, prose: bool) -> Claim:
    """Returns the claim in a marked place, which may be a sentence: ``\\boxed{\\text{The answer is } 42}``."""
    announced = list(ANNOUNCED.finditer(content))
    if (
        announced
        and announced[-1].end() < len(content)
        and (claim := stated(content[announced[-1].end() :].strip(" {}"), prose=prose))
    ):
        return claim
    items = list(ITEM.finditer(content))[:40] if is_prose(content) else []
    doubt = bool(items) and standing(content[: items[0].start()], content[items[-1].end() :]) == "doubt"
    return Claim(content, doubt)


def _side_by_side(places: Sequence[Place], text: str, *, lines: bool) -> Sequence[Place]:
    """Returns the last ones, as long as nothing between them separates answers."""
    first = len(places) - 1
    while first > 0:
        between = text[places[first - 1].end : places[first].start]
        if len(between) > 80 or not (_BETWEEN.fullmatch(between) or (lines and not between.strip())):
            break
        first -= 1
    return places[max(0, first) :]


def _together(places: Sequence[Place], text: str) -> str:
    """Returns several values as one answer of several parts; the same one twice is one."""
    contents = list(dict.fromkeys(unquoted(place.content) for place in places))
    if len(contents) == 1:
        return places[0].content
    joint = " or " if any(_OR.search(text[a.end : b.start]) for a, b in pairwise(places)) else ", "
    return joint.join(place.content for place in places)


def _against(claim: Claim, text: str, end: int, *, prose: bool, form: Form) -> Claim:
    """Adds to a claim what an announcement after it says otherwise."""
    later = _announced(text[end:], prose=prose, parts=1) if claim.text and form == "any" else None
    if later is None or not later.text or not has_mathematics(later.text):
        return claim
    return replace(claim, against=later.text)


def _announced(text: str, *, prose: bool, parts: int) -> Claim | None:
    """Returns the claim after the last "answer is" that its text does not take back; None if there is no announcement."""
    refused: list[str] = []
    claims: list[Claim] = []
    for match in reversed(list(ANNOUNCED.finditer(text))[-TRIES:]):
        before = sentence_before(text, match.start())
        if SUPPOSED.search(before + match.group()):
            continue
        clause = last_clause(before)
        claim = NONE if DOUBTED.search(clause) else stated(_PAUSE.sub("", text[match.end() : match.end() + 1000]), prose=prose)
        if claim is None:
            continue
        if not claim.text:
            refused.append(_key(text[match.end() : match.end() + 200].partition("\n")[0]))
        elif _key(claim.text) not in refused:
            claims.append(claim)
    if 1 < parts == len(claims) == len({unquoted(claim.text) for claim in claims}):
        return Claim(", ".join(claim.text for claim in reversed(claims)))
    if claims:
        earlier = tuple(claim.text for claim in claims[1:3])
        return replace(claims[0], rivals=claims[0].rivals + earlier)
    return NONE if refused and not prose else None


def _key(text: str) -> str:
    """Returns the part of a statement that another one may deny."""
    match = ITEM.search(text)
    return unquoted(match.group()) if match else text.strip(" .*!?").casefold()


def _last(text: str, *, prose: bool) -> Claim | None:
    """Returns the claim of the last sentence with a value that does not take it back; remarks and checks come last."""
    whole = text.strip()
    short = "\n" not in whole and len(whole.split()) <= MAX_WORDS
    if not prose and ITEM.search(whole) is None and (digits := vocabulary.in_digits(whole)) != whole:
        return _last(digits, prose=False)
    if prose or (short and ITEM.search(whole) is None):
        return _last_words(whole, short=short)
    refused: list[str] = []
    remark: Claim | None = None
    given_up = False
    spans = _sentences(text)
    for index, (start, end) in reversed(list(enumerate(spans))):
        sentence = text[start:end]
        if refusal := REFUSED.search(sentence):
            goes_on = CONCLUSION.search(sentence) or "but" in sentence.split()
            if _OF_THE_WRITER.search(refusal.group()) and not goes_on:
                return NONE
            given_up = True
        near = [text[slice(*span)] for span in spans[max(0, index - 3) : index] if "\n" not in text[span[1] : start]]
        if not has_mathematics(sentence) or not values(sentence) or any(map(OFFER.match, (*near, sentence))):
            continue
        claim = asserted(sentence, text[end + 1 :][:1000], announced=False)
        if not claim.text:
            refused.append(_key(sentence))
        elif _key(claim.text) in refused:
            continue
        elif REMARK.match(sentence):
            remark = remark or claim
        else:
            asked = text[end : end + 1] in "?？" and end < len(text)
            supposed = UNREAL.search(sentence) is not None
            given_up = given_up or any(REFUSED.search(text[slice(*span)]) for span in spans[max(0, index - 3) : index])
            unworked = bool(refused) and _UNWORKED.search(claim.text) is not None
            if (earlier := _concluded(text, spans[:index], start, sentence)) is not None:
                return replace(claim, doubt=True, rivals=(*claim.rivals, earlier))
            return replace(claim, doubt=True) if asked or supposed or given_up or unworked else claim
    return remark


def _concluded(text: str, before: Sequence[Span], start: int, sentence: str) -> str | None:
    """Returns the conclusion of the paragraphs before a last one that draws none: the last one may be a remark."""
    apart = bool(before) and "\n\n" in text[before[-1][1] : start].replace(" ", "")
    if not apart or "=" in sentence or _RESULT.search(sentence):
        return None
    last = text[slice(*before[-1])]
    found = asserted(last, announced=False).text if _CONCLUDES.match(last) and values(last) else ""
    return found or None


def _lines(text: str, parts: int) -> Claim | None:
    """Returns the values of a text of as many lines as the label has values."""
    lines = [line for line in text.splitlines() if line.strip()]
    claims = [asserted(line, announced=False) for line in lines] if len(lines) == parts else []
    whole = claims and all(claim.text and not claim.doubt for claim in claims)
    return Claim(", ".join(claim.text for claim in claims)) if whole else None


def _last_words(whole: str, *, short: bool) -> Claim | None:
    """Returns the words of the last sentence: all of a short text, else what is behind its "so" and its verb."""
    spans = _sentences(whole)
    if not spans:
        return None
    sentence = whole[slice(*spans[-1])]
    clause = sentence[max([match.end() for match in CONCLUSION.finditer(sentence)], default=0) :]
    if choice := CHOSEN.match(clause):
        return Claim(choice[1])
    first = whole[slice(*spans[0])].strip(" *,") if spans else ""
    if first.casefold() in _BINARY and not YES_OR_NO.search(whole, spans[0][1]):
        return Claim(first)
    if clause.strip(" ,*.").casefold() in _BINARY:
        return Claim(clause.strip(" ,*."))
    said = whole if short else clause
    for pattern in () if YES_OR_NO.match(said) else (VERB, BEFORE_WORDS):
        ends = [match.end() for match in pattern.finditer(said)]
        if ends and said[ends[-1] :].strip(" .!"):
            claim = asserted(said[ends[-1] :], prose=True)
            return replace(claim, rivals=(*claim.rivals, said))  # "Ann is the tallest"
    return asserted(said, prose=True)


def _sentences(text: str) -> list[Span]:
    spans: list[Span] = []
    start = 0
    for match in SENTENCE_END.finditer(text):
        if text[start : match.start()].strip():
            spans.append((start, match.start()))
        start = match.end()
        if len(spans) > 4 * TRIES:
            del spans[: 2 * TRIES]
    if text[start:].strip():
        spans.append((start, len(text)))
    return spans[-TRIES:]
