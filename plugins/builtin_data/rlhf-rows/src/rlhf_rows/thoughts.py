"""Thoughts between a prompt and its answer: opened once and closed once, by the one or by the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_host import UserError

_REACH = 200  # characters, at most, of what a template opens an answer with
_TAGS_AT_END = re.compile(r"(?:(?:<[^<>\n]{1,40}>|\[[^\[\]\n]{1,40}\])\s*)+$")
_NAME = r"[\w:]*(?:think|thought|reason)[\w:]*"
_OPEN = re.compile(
    rf"<(?P<tag>{_NAME})>|<\|channel>thought(?P<channel>)|<\|START_(?P<side>\w*THINK\w*)\|>|\[(?P<square>THINK)\]",
    re.IGNORECASE,
)
_CLOSES = {"tag": "</{}>", "channel": "<channel|>", "side": "<|END_{}|>", "square": "[/{}]"}
_CLOSED = re.compile(rf"(?:</{_NAME}>|<channel\|>|<\|END_\w*THINK\w*\|>|\[/THINK\])$", re.IGNORECASE)
_OF_THOUGHTS = re.compile(r"</?[\w:]*(?:think|thought|reason)|<\|?channel|<\|(?:START|END)_\w*THINK|\[/?THINK\]", re.IGNORECASE)
_TURNS_ON: tuple[Mapping[str, Any], ...] = ({"enable_thinking": True}, {"thinking": True}, {"reasoning_effort": "high"})
"""Values under which chat templates leave thoughts to the model."""


class ClosedThoughtError(UserError):
    """An answer's thoughts have no place, because its prompt has closed them already."""


@dataclass(frozen=True, slots=True)
class Thought:
    """The tag at the border of a text."""

    open: str
    """Empty at the end of a text that has closed the thought."""
    close: str

    @property
    def closed(self) -> bool:
        return not self.open


def thought_at_end(text: str) -> Thought | None:
    """Returns the thought that a text ends in, or has closed with its last words."""
    tail = text[-_REACH:].rstrip()
    if closed := _CLOSED.search(tail):
        return Thought("", closed[0])
    found = next((found for found in _OPEN.finditer(tail) if found.end() == len(tail)), None)
    return _thought(found) if found else None


def thought_at_start(text: str) -> Thought | None:
    """Returns the thought that a text begins with."""
    found = _OPEN.match(text.lstrip())
    return _thought(found) if found else None


def _thought(found: re.Match[str]) -> Thought:
    kind = str(found.lastgroup)
    return Thought(found[0], _CLOSES[kind].format(found[kind]))


def empty_thought(opening: str, content: str) -> str | None:
    """Returns what closes the thought that a prompt opens, for an answer without one; empty if the prompt has closed it, None if
    it opens none, or the answer has one.

    Args:
        opening: what the prompt has for the answer alone.
    """
    thought = thought_at_end(opening)
    if thought is None or _OF_THOUGHTS.search(content):
        return None
    if thought.closed:
        return ""
    spaces = opening[len(opening.rstrip()) :]
    return f"\n\n{thought.close}\n\n".removeprefix(spaces) if thought.close.startswith("</") else thought.close


def last_tag(prompt: str) -> str:
    """Returns the tag with which a prompt ends; empty: it ends with none."""
    tags = _TAGS_AT_END.search(prompt[-_REACH:])
    return re.split(r"(?=[<\[])", tags[0].rstrip())[-1] if tags else ""


def without_opening(prompt: str, answer: str) -> str:
    """Returns an answer without the tags at its start that its prompt ends with, such as ``<think>``, and without an empty
    thought that its prompt has opened and closed.

    Raises ``ClosedThoughtError`` for an answer that opens a tag that its prompt has closed.
    """
    begun, tags = answer.lstrip(), _TAGS_AT_END.search(prompt[-_REACH:])
    if begun[:1] not in ("<", "["):
        return answer
    spaces, own, before = prompt[len(prompt.rstrip()) :], thought_at_start(begun), thought_at_end(prompt)
    same = own is not None and before is not None and own.close == before.close
    if own and before and same and before.closed:
        rest = begun.removeprefix(own.open).lstrip()
        if not rest.startswith(own.close):
            raise _closed(own.open)
        return rest.removeprefix(own.close).lstrip("\n")
    chain = tags[0].rstrip() if tags else ""
    for place in (place for place, letter in enumerate(chain) if letter in "<["):
        if begun.startswith(chain[place:]):
            return begun.removeprefix(chain[place:]).removeprefix(spaces)
    if own and same:
        return begun.removeprefix(own.open).removeprefix(spaces)
    closed = re.search(r"([<\[])/(\w+[>\]])$", chain)
    if closed and begun.startswith(opened := closed[1] + closed[2]):
        raise _closed(opened)
    return answer


def _closed(tag: str) -> ClosedThoughtError:
    return ClosedThoughtError(f"an answer begins with {tag!r}, and the chat template's prompt has closed that already")


def way_to_think(write: Callable[[Mapping[str, Any]], str]) -> str:
    """Returns what a row can say so that its prompt leaves the thoughts to the answer.

    Args:
        write: writes the prompt with further values for the chat template.
    """
    for values in _TURNS_ON:
        try:
            prompt = write(values)
        except UserError:
            continue
        thought = thought_at_end(prompt)
        if thought is None or not thought.closed:
            name, value = next(iter(values.items()))
            told = "true" if value is True else f'"{value}"'
            return f': turn thinking on for the row (chat_template_kwargs: {{"{name}": {told}}})'
    return ""
