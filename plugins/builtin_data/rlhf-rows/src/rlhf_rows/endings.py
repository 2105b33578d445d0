"""Ends and openings of turns that rows bring along, because a chat template has rendered them already."""

from __future__ import annotations

import re

from rlhf_host import UserError

FOREIGN_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "<|end|>", "</s>", "<｜end▁of▁sentence｜>",
)  # fmt: skip
"""Ends of turns that they write."""
_OPENING = 200  # characters, at most, of what a template opens an answer with
_TAGS_AT_END = re.compile(r"(?:(?:<[^<>\n]{1,40}>|\[[^\[\]\n]{1,40}\])\s*)+$")


_THOUGHT = re.compile(
    r"(?:<(?P<name>[\w:]*(?:think|thought|reason)[\w:]*)>|<\|channel>thought\n)(?P<rest>.*)", re.DOTALL | re.IGNORECASE
)
_OF_THOUGHTS = re.compile(r"</?[\w:]*(?:think|thought|reason)|<\|?channel", re.IGNORECASE)


def without_end(text: str, ends: tuple[str, ...]) -> tuple[str, str]:
    """Returns a text without the end of its turn and the space after it, and this end; empty: it has none.

    Raises ``UserError`` for the end of another model.
    """
    kept, end = text, ""
    while (stripped := kept.rstrip()).endswith(ends):
        end = max((end for end in ends if stripped.endswith(end)), key=len)
        kept = stripped.removesuffix(end)
    if ends and not end and stripped.endswith(FOREIGN_ENDS):
        foreign = next(each for each in FOREIGN_ENDS if stripped.endswith(each))
        raise UserError(
            f"a text ends with {foreign!r}, and here turns end with {' or '.join(map(repr, ends))}: take it out of the row"
        )
    return kept, end


def empty_thought(opening: str, content: str) -> str | None:
    """Returns what closes the thought that a prompt opens, for an answer without one; empty if the prompt has closed it, None if
    it opens none, or the answer has one.

    Args:
        opening: what the prompt has for the answer alone.
    """
    if not (found := _THOUGHT.search(opening)) or _OF_THOUGHTS.search(content):
        return None
    rest, name = found["rest"], found["name"]
    close = f"</{name}>" if name else "<channel|>"
    if rest.strip():
        return "" if rest.strip() == close else None
    return f"\n\n{close}\n\n".removeprefix(rest) if name else close


def last_tag(prompt: str) -> str:
    """Returns the tag with which a prompt ends; empty: it ends with none."""
    tags = _TAGS_AT_END.search(prompt[-_OPENING:])
    return re.split(r"(?=[<\[])", tags[0].rstrip())[-1] if tags else ""


def without_opening(prompt: str, answer: str) -> str:
    """Returns an answer without the tags at its start that its prompt ends with, such as ``<think>``.

    Raises ``UserError`` for an answer that opens a tag that its prompt has closed.
    """
    begun, tags = answer.lstrip(), _TAGS_AT_END.search(prompt[-_OPENING:])
    if tags is None or begun[:1] not in ("<", "["):
        return answer
    chain = tags[0].rstrip()
    for place in (place for place, letter in enumerate(chain) if letter in "<["):
        if begun.startswith(chain[place:]):
            return begun.removeprefix(chain[place:]).removeprefix(prompt[len(prompt.rstrip()) :])
    closed = re.search(r"([<\[])/(\w+[>\]])$", chain)
    if closed and begun.startswith(opened := closed[1] + closed[2]):
        raise UserError(f"an answer begins with {opened!r}, and the chat template's prompt has closed that already")
    return answer
