"""Who says what in a saved text: chat templates leave the name of the speaker on a line before each message."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

SPEAKERS = {
    "system": "System",
    "developer": "System",
    "user": "User",
    "assistant": "Model",
    "model": "Model",
    "tool": "Tool",
    "environment": "Environment",
}
_TAG = r"(?:<[^<>\s]{1,40}>)*"
_NAMED = re.compile(rf"(?:^|(?<=[\n.!?:)\]}}>])){_TAG}({'|'.join(SPEAKERS)}){_TAG}(?:\n+|$)")
_ENDS = re.compile(r"(?:<\|[^<>|\s]{1,40}\|>|</?(?:s|start_of_turn|end_of_turn)>)")

Turn = tuple[str, str]
"""Speaker and text."""


def turns_of(text: str) -> list[Turn]:
    """Returns the messages of a text that begins with the name of a speaker; nothing for any other text."""
    places = list(_NAMED.finditer(text))
    if not places or text[: places[0].start()].strip():
        return []
    ends = [place.start() for place in places[1:]] + [len(text)]
    turns = [(SPEAKERS[place[1]], text[place.end() : end]) for place, end in zip(places, ends, strict=True)]
    clean = [(speaker, _ENDS.sub("", said).strip("\n")) for speaker, said in turns]
    return [(speaker, said) for speaker, said in clean if said.strip()]


def turns_of_messages(messages: Any) -> list[Turn]:
    """Returns the messages of a prompt that is a list of them; nothing for any other prompt."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return []
    known = [message for message in messages if isinstance(message, Mapping) and "role" in message]
    return [(SPEAKERS.get(str(each["role"]), str(each["role"]).capitalize()), _said(each)) for each in known]


def _said(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [str(part.get("text", f"[{part.get('type')}]")) if isinstance(part, Mapping) else str(part or "") for part in parts]
    calls = message.get("tool_calls")
    return "\n".join(filter(None, [*texts, json.dumps(calls, ensure_ascii=False) if calls else ""]))
