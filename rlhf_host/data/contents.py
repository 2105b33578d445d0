"""Contents of chat messages: a text, or a list of its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_host.errors import UserError, a

_TEXT_PARTS = (None, "text", "input_text", "output_text")


def text_of(content: Any) -> str:
    """Returns a message's content as one text: parts are joined, ``None`` is empty. Raises ``UserError`` for content that is
    not text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise UserError(f"a message's content is {a(type(content).__name__)}: write it as text, as by json.dumps")
    return "".join(map(_text_of_part, content))


def _text_of_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text", part.get("value")) if isinstance(part, Mapping) and kind in _TEXT_PARTS else None
    if not isinstance(text, str):
        raise UserError(f"a message's content has a part of the type {kind!r}: only texts are read")
    return text
