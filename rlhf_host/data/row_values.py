"""What values of rows must be: texts, messages, labels, numbers."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from rlhf_host.data.row_reader import Malformed, check_text, clean_messages, get
from rlhf_host.errors import near_matches
from rlhf_host.records.episodes import Message

Text: TypeAlias = str | list[Message]

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
    "function_call": "assistant", "observation": "tool", "tool": "tool",
}  # fmt: skip
UNTRAINED = "untrained"
"""The key, set to True, of an assistant's message that is not trained."""


def is_sharegpt(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping) and "from" in value[0]


def text_of(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise Malformed(f"{key!r} must be a text, not {kind_of(value)}")
    if not value.strip():
        raise Malformed(f"{key!r} is empty")
    check_text(value, key)
    return value


def answer_of(value: Any, key: str) -> Text:
    """A text, or messages that end with the assistant's."""
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        return text_of(value, key)
    messages = messages_of(value, key)
    if messages[-1]["role"] != "assistant":
        raise Malformed(f"{key!r} must end with an assistant's message, not one of the role {messages[-1]['role']!r}")
    return messages


def messages_of(value: Any, key: str) -> list[Message]:
    """Messages of known roles; what is not trained is marked as ``UNTRAINED``."""
    if not isinstance(value, list):
        raise Malformed(f"{key!r} must be a list of messages, not {kind_of(value)}")
    if not value:
        raise Malformed(f"{key!r} has no messages")
    messages = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise Malformed(f'{key!r}: message {number} must be {{"role": ..., "content": ...}}')
        messages.append(_message(message, f"{key!r}: message {number} ({message['role']})", key))
    return messages


def _message(message: Mapping[str, Any], which: str, key: str) -> Message:
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        raise Malformed(f"{which} has an unknown role{near_matches(role, ROLES)}; known are {', '.join(ROLES)}")
    calls = role == "assistant" and bool(message.get("tool_calls"))
    if calls:
        _check_calls(message["tool_calls"], which)
        content = content or ""
    if not isinstance(content, str):
        raise Malformed(f"{which} must have a text as content, not {kind_of(content)}")
    if role == "assistant" and not content.strip() and not calls:
        raise Malformed(f"{which} is empty")
    check_text(content, key)
    (cleaned,) = clean_messages([{**message, "content": content}])
    weight, train = cleaned.pop("weight", 1), cleaned.pop("train", True)
    if weight not in (0, 1) or train not in (True, False):
        raise Malformed(f"{which}: 'weight' must be 0 or 1, and 'train' true or false")
    return {**cleaned, UNTRAINED: True} if not (weight and train) else dict(cleaned)


def _check_calls(calls: Any, which: str) -> None:
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise Malformed(
                f'{which}: \'tool_calls\' must be a list of {{"type": "function", "function": {{"name": ..., "arguments": ...}}}}'
            )


def sharegpt_of(row: Mapping[str, Any], key: str) -> list[Message]:
    value = get(row, key, "conversation")
    if not isinstance(value, list) or not value:
        raise Malformed(
            f"{key!r} must be a list of messages, not {kind_of(value)}" if value != [] else f"{key!r} has no messages"
        )
    messages = [sharegpt_message(message, f"{key}[{number}]") for number, message in enumerate(value)]
    system = row.get("system")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": text_of(system, "system")})
    return messages


def sharegpt_message(message: Any, key: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("from"), str):
        raise Malformed(f'{key!r} must be {{"from": ..., "value": ...}}')
    sender = message["from"]
    if sender not in SHAREGPT_ROLES:
        raise Malformed(
            f"{key!r} is from {sender!r}{near_matches(sender, SHAREGPT_ROLES)}; known are {', '.join(SHAREGPT_ROLES)}"
        )
    known = {name: value for name, value in message.items() if name not in ("from", "value")}
    if sender == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": _function_calls(message.get("value"), key)}
    return _message({**known, "role": SHAREGPT_ROLES[sender], "content": message.get("value")}, f"{key!r}", key)


def _function_calls(value: Any, key: str) -> list[dict[str, Any]]:
    try:
        calls = json.loads(value)
        calls = calls if isinstance(calls, list) else [calls]
        functions = [{"name": call["name"], "arguments": call.get("arguments", {})} for call in calls]
    except (TypeError, ValueError, KeyError, AttributeError):
        raise Malformed(f'{key!r}: a function_call must be JSON: {{"name": ..., "arguments": ...}}') from None
    return [{"type": "function", "function": function} for function in functions]


def tools_of(row: Mapping[str, Any]) -> Sequence[Any] | None:
    """The row's tools, which many files have as JSON in a text."""
    tools = row.get("tools")
    if not tools:
        return None
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except ValueError:
        raise Malformed("'tools' is a text that is not JSON") from None
    if not isinstance(tools, list):
        raise Malformed(f"'tools' must be a list, not {kind_of(tools)}")
    return tools or None


def label_of(value: Any, key: str, *, soft: bool) -> float:
    if isinstance(value, str):  # tables have nothing else
        value = {"true": 1, "1": 1, "false": 0, "0": 0}.get(value.lower(), value)
    number = value if isinstance(value, bool | int | float) else None
    if number is None or not (0 <= number <= 1) or (not soft and number not in (0, 1)):
        known = "a number from 0 to 1" if soft else "true or false, 1 or 0"
        raise Malformed(f"{key!r} must be {known}, not {value!r}")
    return float(number)


def number_of(value: Any, key: str) -> float:
    if isinstance(value, str):  # tables have nothing else
        with contextlib.suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Malformed(f"{key!r} must be a finite number, not {value!r}")
    return float(value)


def kind_of(value: Any) -> str:
    names = {type(None): "null", list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)
