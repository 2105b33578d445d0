"""Marked texts as rows of tokens: spans of characters become spans of tokens, and no token crosses an edge of a span."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from rlhf_host import UserError
from rlhf_host.internals import Malformed, Numbers
from rlhf_host.rendering import Processor, encode, refuse_unseen, trim
from rlhf_host.rollouts import encode_prompts
from rlhf_rows.spans import MarkedText
from rlhf_rows.units import Row

_TAIL = 16  # characters before an edge that settle which token ends there
_OVERLAP = 40  # characters of a prompt, at least, that are tokenised again with its completion
_WORD = re.compile(r"(?<=\S) (?=\w)")


@dataclass(frozen=True, slots=True)
class _Encoded:
    """Tokens of a text, and the characters where they begin."""

    ids: list[int]
    encoding: Any
    length: int
    """Characters of the text."""

    def token_at(self, place: int) -> int | None:
        """Returns the number of the token that begins at a character, if the token before ends there."""
        number: int | None = len(self.ids) if place == self.length else self.encoding.char_to_token(place)
        return number if number and self.encoding.token_to_chars(number - 1)[1] == place else None


class Encoder:
    """Encoder of marked texts as rows.

    The prompt's tokens are those that the model gets when it is prompted, whatever follows. Prompt and completion are then
    tokenised as one text, from which the completion's tokens are taken. Only the last words of a long prompt are tokenised
    again, if their tokens do not depend on earlier text. The completion is tokenised in pieces if the edge of a span would be
    inside a token, or if the text before a later answer would end with another token than it does in a prompt.

    Args:
        separator: the text put after each step, whose last token has the step's label.
    """

    def __init__(self, tokenizer: Any, separator: str = "\n"):
        self._tokenizer = tokenizer
        self._offsets = bool(getattr(tokenizer, "is_fast", False))
        self.separator = separator
        self._separator = encode([separator], tokenizer, special=False)[0]
        self._last: dict[str, int | None] = {}
        self._before: list[int] = []
        """Tokens of a newline, if the tokenizer puts a space before a text that begins without one (SentencePiece)."""
        newline, alone, after = encode(["\n", "a", "\na"], tokenizer, special=False)
        if newline and after[: len(newline)] == newline and after[len(newline) :] != alone:
            self._before = newline

    def encode(self, texts: Sequence[MarkedText]) -> list[Row | Malformed]:
        """Returns a row for each text, or what is wrong with it."""
        faults = [_half_characters(text) for text in texts]
        whole = [text for text, fault in zip(texts, faults, strict=True) if fault is None]
        prompts = self._prompts(whole)
        rows = iter(self._rows(whole, prompts))
        return [next(rows) if fault is None else fault for fault in faults]

    def _prompts(self, texts: Sequence[MarkedText]) -> Mapping[tuple[str, bool], _Encoded]:
        """Encodes every prompt."""
        known: dict[tuple[str, bool], _Encoded] = {}
        for chat in (False, True):
            prompts = list(dict.fromkeys(text.prompt for text in texts if text.chat == chat and text.prompt))
            known |= {(each, chat): encoded for each, encoded in zip(prompts, self._encoded(prompts, not chat), strict=True)}
        return known

    def _rows(self, texts: Sequence[MarkedText], prompts: Mapping[tuple[str, bool], _Encoded]) -> list[Row | Malformed]:
        joined = [text for text in texts if text.prompt and not text.steps] if self._offsets else []
        whole = iter(self._with_completions(joined, [prompts[text.prompt, text.chat] for text in joined]))
        documents = iter(encode_prompts([text.rest for text in texts if not text.prompt], self._tokenizer, chat=False))
        trimmed = {
            (prompt, chat): encoded.ids if chat else trim(prompt, encoded.ids, self._tokenizer)
            for (prompt, chat), encoded in prompts.items()
        }
        rows: list[Row | Malformed] = []
        for text in texts:
            if not text.prompt:
                rows.append(self._document(next(documents), text))
                continue
            prompt = trimmed[text.prompt, text.chat]
            if text.steps:
                rows.append(self._steps(prompt, text) if prompt else _no_tokens("prompt", text.prompt))
                continue
            completion = self._whole(text, next(whole)) if self._offsets else None
            ids, spans = completion or self._tokens_and_spans(text)
            rows.append(self._row(prompt, ids, spans, text))
        return [_seen(row, text, self._tokenizer) for row, text in zip(rows, texts, strict=True)]

    def _encoded(self, texts: Sequence[str], special: bool) -> list[_Encoded]:
        if not texts:
            return []
        encoded = self._tokenizer(list(texts), add_special_tokens=special, return_attention_mask=False)
        encodings = encoded.encodings if self._offsets else [None] * len(texts)
        each = zip(texts, encoded["input_ids"], encodings, strict=True)
        return [_Encoded(ids, encoding, len(text)) for text, ids, encoding in each]

    def _with_completions(self, texts: Sequence[MarkedText], prompts: Sequence[_Encoded]) -> list[tuple[int, _Encoded]]:
        """Returns for each text how much of its prompt was left out, and the rest with its completion."""
        begins = [_last_words(text.prompt) for text in texts]
        parts = self._encoded([text.prompt[begin:] + text.rest for text, begin in zip(texts, begins, strict=True)], False)
        again = [number for number, begin in enumerate(begins) if begin and not _goes_on(prompts[number], begin, parts[number])]
        whole = self._encoded([texts[number].prompt + texts[number].rest for number in again], False)
        for number, encoded in zip(again, whole, strict=True):
            begins[number], parts[number] = 0, encoded
        return list(zip(begins, parts, strict=True))

    def _row(self, prompt: list[int], ids: list[int], spans: list[tuple[int, int]], text: MarkedText) -> Row | Malformed:
        if not prompt:
            return _no_tokens("prompt", text.prompt)
        if not spans:
            return _no_tokens("answer", text.rest)
        if text.end is not None and ids[-1] != text.end:
            ids = [*ids, text.end]
            spans = [*spans[:-1], (spans[-1][0], len(ids))]
        return Row(Numbers("i", prompt), Numbers("i", ids), tuple(spans), text.columns)

    def _document(self, ids: list[int], text: MarkedText) -> Row | Malformed:
        """Encodes a text without a prompt: the first token is the prompt, because nothing comes before it to predict it."""
        if text.end is not None and ids and ids[-1] != text.end:
            ids = [*ids, text.end]
        if len(ids) < 2:
            return _no_tokens("text", text.rest)
        return Row(Numbers("i", ids[:1]), Numbers("i", ids[1:]), ((0, len(ids) - 1),), text.columns)

    def _steps(self, prompt: list[int], text: MarkedText) -> Row | Malformed:
        ids: list[int] = []
        labels: list[float] = []
        for (step, label), tokens in zip(
            text.steps, encode([step for step, _ in text.steps], self._tokenizer, special=False), strict=True
        ):
            if not tokens:
                return _no_tokens("step", step)
            ids += [*tokens, *self._separator]
            labels += [math.nan] * (len(ids) - len(labels) - 1) + [label]
        spans = tuple((place, place + 1) for place, label in enumerate(labels) if not math.isnan(label))
        return Row(Numbers("i", prompt), Numbers("i", ids), spans, text.columns, {"step": Numbers("f", labels)})

    def _whole(self, text: MarkedText, part: tuple[int, _Encoded]) -> tuple[list[int], list[tuple[int, int]]] | None:
        """Returns the completion's tokens and spans from those of the whole text, or None if an edge is inside a token."""
        left_out, encoded = part
        cut, ids, token_at = len(text.prompt) - left_out, encoded.ids, encoded.token_at
        first = token_at(cut)
        if first is None:
            return None
        spans = []
        for begin, end in text.trained:
            low, high = token_at(cut + begin), token_at(cut + end)
            if low is None or high is None or (begin and not self._ends_alike(text, begin, ids[low - 1])):
                return None
            if low < high:
                spans.append((low - first, high - first))
        return ids[first:], spans

    def _ends_alike(self, text: MarkedText, place: int, token: int) -> bool:
        """Returns True if the text before a later answer ends with this token even if nothing follows, as in a prompt."""
        before = text.rest[max(0, place - _TAIL) : place]
        if before not in self._last:
            self._last[before] = (encode([before], self._tokenizer, special=False)[0] or [None])[-1]  # type: ignore[list-item]
        return self._last[before] == token

    def _tokens_and_spans(self, text: MarkedText) -> tuple[list[int], list[tuple[int, int]]]:
        edges = sorted({0, len(text.rest), *(place for span in text.trained for place in span)})
        ids: list[int] = []
        spans = []
        starts = {begin for begin, _ in text.trained}
        pieces = self._middle([text.rest[begin:end] for begin, end in pairwise(edges)])
        for begin, tokens in zip(edges, pieces, strict=False):
            if begin in starts and tokens:
                spans.append((len(ids), len(ids) + len(tokens)))
            ids += tokens
        return ids, spans

    def _middle(self, pieces: Sequence[str]) -> list[list[int]]:
        """Returns the tokens of texts that follow other text."""
        alone = encode(pieces, self._tokenizer, special=False)
        if not self._before:
            return alone
        begin = len(self._before)
        after = encode([f"\n{piece}" for piece in pieces], self._tokenizer, special=False)
        return [ids[begin:] if ids[:begin] == self._before else plain for ids, plain in zip(after, alone, strict=True)]


def _seen(row: Row | Malformed, text: MarkedText, tokenizer: Any) -> Row | Malformed:
    """Returns the row with the tokens of its pictures, or what is wrong with them."""
    if isinstance(row, Malformed):
        return row
    try:
        if not text.images:
            refuse_unseen(tokenizer, row.prompt_ids, row.completion_ids, text=text.prompt)
            return row
        processor = Processor.of(tokenizer)
        count = list(row.prompt_ids).count(processor.placeholder)
        first, later = text.images[:count], text.images[count:]
        prompt = processor.expand(row.prompt_ids, first, text.prompt)
        completion = processor.expand(row.completion_ids, later)
        added = [0]
        pictures = iter(later)
        for token in row.completion_ids:
            own = len(processor.tokens(next(pictures))) - 1 if token == processor.placeholder else 0
            added.append(added[-1] + own)
    except UserError as error:
        return Malformed(str(error))
    columns = {name: values for name, values in row.token_columns.items() if not later}
    if columns.keys() != row.token_columns.keys():
        return Malformed("a row with values for its tokens cannot have pictures in its answer")
    trained = tuple((begin + added[begin], end + added[end]) for begin, end in row.trained)
    return replace(
        row, prompt_ids=Numbers("i", prompt), completion_ids=Numbers("i", completion), trained=trained, images=text.images
    )


def _last_words(prompt: str) -> int:
    """Returns where the last words of a long prompt begin; 0: it is short."""
    found = _WORD.search(prompt, max(0, len(prompt) - 2 * _OVERLAP), max(0, len(prompt) - _OVERLAP))
    return 0 if found is None else found.start()


def _goes_on(prompt: _Encoded, begin: int, part: _Encoded) -> bool:
    """Returns True if the tokens of ``part``, which begins there, are those of the prompt, up to the last words before its end.

    Tokenizers split texts into words from left to right, so tokens from there on do not depend on earlier text.
    """
    first = prompt.token_at(begin)
    same = part.encoding.char_to_token(prompt.length - begin - _TAIL)
    return bool(first and same) and part.ids[:same] == prompt.ids[first : first + same]


def _half_characters(text: MarkedText) -> Malformed | None:
    try:
        (text.prompt + text.rest).encode()
    except UnicodeEncodeError as error:
        return Malformed(f"has half a character, {error.object[error.start]!a}: no tokenizer can read it")
    return None


def _no_tokens(what: str, text: str) -> Malformed:
    return Malformed(f"the tokenizer has no token for the {what} {text[:40]!r}")
