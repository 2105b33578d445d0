"""Texts that a chat template has rendered already: they contain its openings of turns, or end as its turns do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from rlhf_host.data.template_writer import TemplateWriter
from rlhf_host.errors import UserError
from rlhf_host.records.episodes import Message

FOREIGN = (
    "<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "[INST]", "<|user|>", "<｜User｜>", "<|START_OF_TURN_TOKEN|>",
)  # fmt: skip
"""Openings of turns that the templates of well-known models write."""
_TRANSCRIPT = re.compile(r"\s*Human:.*\n\s*Assistant:\s*", re.DOTALL)


class Rendered:
    """Finds the marks of one tokenizer's chat template in texts."""

    def __init__(self, writer: TemplateWriter):
        self._writer = writer

    def refuse(self, text: str, what: str) -> None:
        """Raises ``UserError`` for a text with an opening of a turn: it would be rendered twice."""
        if (opening := self.opening_in(text)) is not None:
            raise UserError(
                f"{what} is rendered already: it has {opening!r}, which the chat template writes; set data.template to none, which"
                " takes texts as they are, or give plain messages"
            )
        if is_transcript(text):
            raise UserError(
                f"{what} is a transcript, from 'Human:' to 'Assistant:': set data.template to none, which takes texts as they are,"
                " or give messages"
            )
        for opening in FOREIGN:
            if opening in text:
                raise UserError(
                    f"{what} is rendered already, in the chat template of another model: it has {opening!r}; give plain messages"
                )

    def opening_in(self, text: str) -> str | None:
        """Returns the first of the template's openings in the text."""
        for opening in self._openings:
            if opening in text:
                return opening
        return None

    @cached_property
    def _openings(self) -> tuple[str, ...]:
        return tuple(self._learn())

    def _learn(self) -> Iterator[str]:
        """Learns the text before the contents of users and assistants. Mere words, such as ``user:``, are ignored: any text may
        contain them.
        """
        write, mark = self._writer.write, self._writer.mark
        first, second, third = (f"{name}{mark}" for name in "abc")
        asked: list[Message] = [{"role": "user", "content": first}]
        talk: list[Message] = [*asked, {"role": "assistant", "content": second}, {"role": "user", "content": third}]
        try:
            whole = write(talk, opens=False)
            endings = [write(part, opens=False).rpartition(mark)[2] for part in (asked, talk[:2])]
        except UserError:  # it wants other roles
            return
        between = [whole.partition(a)[2].partition(b)[0].strip() for a, b in ((first, second), (second, third))]
        answers, users = (min((self._without(each, end.strip()) for end in endings), key=len) for each in between)
        others = (re.sub(r"\buser\b", role, users) for role in ("assistant", "system"))
        for opening in dict.fromkeys((users, *others, answers) if _is_mark(users) else between):
            if _is_mark(opening):
                yield opening

    def _without(self, text: str, ending: str) -> str:
        """Returns the text without the special tokens at its start, and the text between them, if the ending begins with the
        same.
        """
        names = sorted(special_tokens(self._writer.tokenizer), key=len, reverse=True)
        cut = re.compile("(" + "|".join(map(re.escape, names)) + ")" if names else r"(?!)")
        pieces, others = cut.split(text), cut.split(ending)
        same = in_common(pieces, others)
        return "".join(pieces[same:]).strip()


def is_transcript(text: str) -> bool:
    """Returns True if the text goes from ``Human:`` to ``Assistant:``, like prompts in Anthropic's data."""
    return _TRANSCRIPT.fullmatch(text) is not None


def special_tokens(tokenizer: Any) -> set[str]:
    known = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_tokens, *(str(token) for token in known.values() if token.special)} - {""}


def _is_mark(text: str) -> bool:
    return re.search(r"[^\w\s:]", text) is not None


def in_common(one: Sequence[str], other: Sequence[str]) -> int:
    """Returns the length of the beginning that two texts, or lists of texts, share."""
    least = min(len(one), len(other))
    if one[:least] == other[:least]:
        return least
    return next(place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
