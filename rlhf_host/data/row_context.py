"""Values of a row beside its conversation: a system message, tools and values for the chat template; and columns that cannot be
honoured.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_host.data.bad_rows import Malformed, check_text, kind_of
from rlhf_host.data.contents import text_of
from rlhf_host.records.episodes import Message

SYSTEM = ("system", "system_prompt", "system_message", "system_msg", "system_instruction", "systemPrompt")
TOOLS = ("tools", "functions")
TEMPLATE_KWARGS = ("chat_template_kwargs", "apply_chat_template_kwargs", "template_kwargs")
TOLD: Mapping[str, type] = {"enable_thinking": bool, "reasoning_effort": str}
"""Columns that are passed to the chat template under their own names → their required type."""
TEMPLATE = "chat_template"
PICTURES = ("image", "images")
OTHER_MEDIA = ("video", "videos", "audio", "audios", "pixel_values", "multi_modal_data", "multi_modal_inputs")
HISTORY = "history"
BESIDE = frozenset((*SYSTEM, *TOOLS, *TEMPLATE_KWARGS, *TOLD, TEMPLATE, *PICTURES, *OTHER_MEDIA, HISTORY))


@dataclass(frozen=True, slots=True)
class RowContext:
    """Values beside a conversation."""

    system: str | None = None
    tools: Sequence[Any] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    images: Sequence[Any] = ()
    """Pictures as the row has them."""

    def __bool__(self) -> bool:
        return self.system is not None or self.tools is not None or bool(self.template_kwargs) or bool(self.images)


NOTHING = RowContext()


def context_of(row: Mapping[str, Any], read: Collection[str] = ()) -> RowContext:
    """Returns the values of the row's columns.

    Args:
        read: columns that are left out here, because other code reads them or ``data.ignore`` names them.

    Raises ``Malformed`` for columns that cannot be honoured.
    """
    if BESIDE.isdisjoint(row):
        return NOTHING
    given = {name: value for name, value in row.items() if name in BESIDE and name not in read and not is_empty(value)}
    for name in (*OTHER_MEDIA, HISTORY, TEMPLATE):
        if name in given:
            whys = {HISTORY: "earlier turns belong into the messages", TEMPLATE: "the tokenizer's chat template is used"}
            why = whys.get(name, "texts and pictures are read")
            raise Malformed(f"{name!r}: {why} (data.ignore {name} leaves it unread)")
    told = {name: value for name, value in _template_kwargs(given).items() if value is not None and name not in read}
    return RowContext(system_of(given), _tools(given), told, _images(given))


def with_system(messages: Sequence[Message], system: str | None) -> list[Message]:
    """Returns the conversation with the row's system message. Raises ``Malformed`` if it has another one already."""
    if system is None:
        return list(messages)
    own = [message for message in messages if message["role"] == "system"]
    if not own:
        return [{"role": "system", "content": system}, *messages]
    if text_of(own[0]["content"]).strip() != system.strip():
        raise Malformed(
            "the column with the system message and the messages have different ones: keep one, or leave the column unread"
            " (data.ignore)"
        )
    return list(messages)


def is_empty(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(each is None for each in value)
    return value is None or value != value or (isinstance(value, str | Mapping) and not value)


def system_of(row: Mapping[str, Any]) -> str | None:
    """Returns the row's own system message. Raises ``Malformed`` if there are two, or one that is not text."""
    texts = {}
    for name in SYSTEM:
        value = row.get(name) or ""
        if not isinstance(value, str):
            raise Malformed(f"{name!r} must be a text, not {kind_of(value)} (data.ignore {name} leaves it unread)")
        check_text(value, name)
        if value.strip():
            texts[name] = value
    if len(set(texts.values())) > 1:
        raise Malformed(f"{' and '.join(map(repr, texts))} differ: leave one of them unread (data.ignore)")
    return next(iter(texts.values()), None)


def _images(row: Mapping[str, Any]) -> Sequence[Any]:
    """Returns the row's pictures. Raises ``Malformed`` if two columns have some."""
    found = {name: row[name] for name in PICTURES if name in row}
    if len(found) > 1:
        raise Malformed(f"{' and '.join(map(repr, found))} are both there: leave one of them unread (data.ignore)")
    return next((value if isinstance(value, list | tuple) else [value] for value in found.values()), ())


def _tools(row: Mapping[str, Any]) -> list[Any] | None:
    """Returns the row's tools, which many files hold as JSON in a text."""
    found = {name: tools for name in TOOLS if (tools := _json(row.get(name), name))}
    if len(found) > 1:
        raise Malformed(f"{' and '.join(map(repr, found))} are both there: leave one of them unread (data.ignore)")
    for name, tools in found.items():
        if not isinstance(tools, list):
            raise Malformed(f"{name!r} must be a list, not {kind_of(tools)} (data.ignore {name} leaves it unread)")
        return [_tool(_json(tool, name), name) for tool in tools]
    return None


def _tool(tool: Any, name: str) -> dict[str, Any]:
    """Returns one tool without the nulls of its outer parts, in the wrapper that many files leave out."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        form = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
        raise Malformed(f"{name!r} must be a list of {form} (data.ignore {name} leaves it unread)")
    plain = {key: value for key, value in function.items() if value is not None}
    if function is tool:
        return {"type": "function", "function": {key: value for key, value in plain.items() if key != "type"}}
    return {**{key: value for key, value in tool.items() if value is not None}, "function": plain}


def _json(value: Any, name: str) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise Malformed(f"{name!r} is a text that is not JSON (data.ignore {name} leaves it unread)") from None


def _template_kwargs(row: Mapping[str, Any]) -> Mapping[str, Any]:
    told: dict[str, Any] = {}
    for name in (*TEMPLATE_KWARGS, *TOLD):
        if name not in row:
            continue
        value = row[name]
        if name in TOLD:
            if not isinstance(value, TOLD[name]):
                wanted = "true or false" if TOLD[name] is bool else "a text"
                raise Malformed(f"{name!r} must be {wanted}, not {value!r} (data.ignore {name} leaves it unread)")
            value = {name: value}
        elif not isinstance(value := _json(value, name), Mapping):
            raise Malformed(f"{name!r} must be a mapping, not {kind_of(value)} (data.ignore {name} leaves it unread)")
        for key, each in value.items():
            if told.setdefault(key, each) != each:
                raise Malformed(f"the row has two values of {key!r} for the chat template (data.ignore {name})")
    return told
