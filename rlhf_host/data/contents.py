"""Contents of chat messages: a text, or a list of parts, which are texts and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_host.errors import UserError, a
from rlhf_host.records.pictures import is_list, is_picture

_TEXT_PARTS = (None, "text", "input_text", "output_text")


def text_of(content: Any) -> str:
    """Returns the words of a message's content as one text: parts are joined, ``None`` and pictures are empty. Raises
    ``UserError`` for other content.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise UserError(f"a message's content is {a(type(content).__name__)}: write it as text, as by json.dumps")
    return "".join(map(_text_of_part, content))


def texts_of(content: Any) -> list[str]:
    """Returns the words of a message's content, cut where a picture is. Raises ``UserError`` as ``text_of``."""
    if not has_pictures(content):
        return [text_of(content)]
    texts = [""]
    for part in content:
        if is_picture(part):
            texts.append("")
        else:
            texts[-1] += _text_of_part(part)
    return [text for text in texts if text]


def has_pictures(content: Any) -> bool:
    """Returns True for a content with a part that is a picture."""
    return bool(pictures(content))


def pictures(content: Any) -> list[Any]:
    """Returns the parts of a content that are pictures."""
    return list(filter(is_picture, content)) if is_list(content) else []


def text_items(content: Any) -> list[dict[str, str]]:
    """Returns a content in the form of chat templates: texts and places of pictures."""
    parts: list[dict[str, str]] = []
    for part in content if is_list(content) else [text_of(content)]:
        if is_picture(part):
            parts.append({"type": "image"})
        elif (text := _text_of_part(part)) and parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += text
        elif text:
            parts.append({"type": "text", "text": text})
    return parts


def _text_of_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if is_picture(part):
        return ""
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text", part.get("value")) if isinstance(part, Mapping) and kind in _TEXT_PARTS else None
    if not isinstance(text, str):
        raise UserError(f"a message's content has a part of the type {kind!r}: texts and pictures are read")
    return text
