"""Results of tools as contents of messages."""

from __future__ import annotations

import json
from typing import Any

from mcp.types import (
    AudioContent,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from rlhf_plugin_multi_turn.tools import shortened


class NotShown(Exception):
    """A result has something that cannot be in a conversation."""


def content_of(result: CallToolResult, most: int) -> tuple[str, list[dict[str, Any]]]:
    """Returns the text of a result, and its pictures as parts of a message. Raises ``NotShown`` for sound and binary files.

    Args:
        most: longest text; of a longer one, head and tail are kept.
    """
    texts: list[str] = []
    pictures: list[dict[str, Any]] = []
    for part in result.content:
        match part:
            case TextContent():
                texts.append(part.text)
            case ImageContent():
                pictures.append({"type": "image", "image": f"data:{part.mime_type};base64,{part.data}"})
            case ResourceLink():
                texts.append(f"{part.name}: {part.uri}")
            case EmbeddedResource(resource=TextResourceContents(text=text)):
                texts.append(text)
            case AudioContent():
                raise NotShown(f"sound ({part.mime_type})")
            case _:
                raise NotShown(f"a binary file ({getattr(getattr(part, 'resource', None), 'mime_type', None)})")
    if not texts and not pictures and result.structured_content is not None:
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    text = shortened("\n".join(texts), most)
    return (f"Error: {text}" if result.is_error else text), pictures
