"""Two tokenisations of one text, cut where both have an edge between tokens. Imports no torch.

GOLD (Hugging Face, "Unlocking on-policy distillation for any model family", 2025) does it by decoded text; here it is by bytes,
because tokens may cut a character.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import NamedTuple

from rlhf_plugin_distill.token_bytes import TokenBytes


class Span(NamedTuple):
    """A piece of text: ``count`` tokens from ``begin`` on, of the student and of the teacher."""

    begin: int
    count: int
    other_begin: int
    other_count: int


@dataclass(frozen=True, slots=True)
class Said:
    """The text of tokens, up to the first special one."""

    text: str
    """Bytes that are no UTF-8 are the sign U+FFFD."""
    ends: tuple[int | None, ...]
    """Place in the bytes of ``text`` where each token ends; ``None``: inside bytes that are no UTF-8."""
    broken: tuple[tuple[int, int], ...]
    """Places of the signs U+FFFD that stand for such bytes."""
    last: int | None
    """The special token after these, if there is one and nothing follows."""


def said(ids: Sequence[int], tokens: TokenBytes) -> Said:
    """Returns what sampled tokens say."""
    pieces = [*takewhile(lambda piece: piece is not None, map(tokens, ids))]
    raw = b"".join(piece for piece in pieces if piece is not None)
    places, broken, parts, begin, length = list[int | None](), list[tuple[int, int]](), list[str](), 0, 0
    while begin < len(raw):
        try:
            good, bad, part = len(raw) - begin, 0, raw[begin:].decode()
        except UnicodeDecodeError as error:
            good, bad = error.start, error.end - error.start
            part = raw[begin : begin + good].decode() + "\ufffd"
        places += range(length, length + good)
        length += good
        if bad:
            places += [length, *[None] * (bad - 1)]
            broken.append((length, length + 3))
            length += 3
        parts.append(part)
        begin += good + bad
    places.append(length)
    ends = [places[end] for end in accumulate(len(piece or b"") for piece in pieces)]
    rest = [*ids[len(pieces) :]]
    last = rest[0] if len(rest) == 1 and rest[0] in tokens.special else None
    return Said("".join(parts), tuple(ends), tuple(broken), last)


def read_ends(text: str, ids: Sequence[int], tokens: TokenBytes) -> list[int]:
    """Returns the places in the bytes of a text where a tokenizer's tokens of it end, up to the first token that is special or
    says something else. A space that the tokenizer puts before a text has no place.
    """
    pieces = [piece for piece in takewhile(lambda piece: piece is not None, map(tokens, ids)) if piece is not None]
    as_it_is = _matched(text.encode(), pieces)
    if not pieces or pieces[0][:1] != b" ":
        return as_it_is
    return max(as_it_is, _matched(text.encode(), [pieces[0][1:], *pieces[1:]]), key=len)


def _matched(whole: bytes, pieces: Sequence[bytes]) -> list[int]:
    ends = zip(pieces, accumulate(map(len, pieces)), strict=True)
    return [end for _, end in takewhile(lambda pair: whole[: pair[1]].endswith(pair[0]) and pair[1] <= len(whole), ends)]


def spans(student: Said, teacher: Sequence[int]) -> list[Span]:
    """Returns the shortest pieces of text that both have as whole tokens, in order, up to where one of them goes no further.
    Pieces with bytes that are no UTF-8 are left out: the teacher reads another text there.

    Args:
        teacher: places where its tokens end (``read_ends``).
    """
    ours = {end: number for number, end in enumerate(student.ends) if end is not None}
    theirs = {end: number for number, end in enumerate(teacher)}
    found, place, begin, other = list[Span](), 0, 0, 0
    for end in sorted(ours.keys() & theirs.keys()):
        span = Span(begin, ours[end] + 1 - begin, other, theirs[end] + 1 - other)
        whole = all(end <= low or high <= place for low, high in student.broken)
        if place < end and whole:
            found.append(span)
        place, begin, other = end, ours[end] + 1, theirs[end] + 1
    return found
