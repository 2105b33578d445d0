"""Tool calls in plain text, for chat templates that have no tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_host import Message, ToolCall

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def with_tools(prompt: str | Sequence[Message], schemas: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Returns the conversation with the tools before its first user's message: every template has that role."""
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*map(dict, prompt)]
    tools = "\n".join(json.dumps(schema["function"], ensure_ascii=False) for schema in schemas)
    text = (
        f"You can use these tools:\n{tools}\n\nTo use one, write\n<tool_call>\n"
        '{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}\n</tool_call>\nand stop. Its result follows.'
    )
    for message in messages:
        if message["role"] == "user":
            message["content"] = f"{text}\n\n{message['content']}"
            return messages
    return [{"role": "user", "content": text}, *messages]


def read_calls(text: str) -> tuple[list[ToolCall], list[str]]:
    """Returns the calls in an answer, and the parts that cannot be read."""
    calls, problems = [], []
    for body in _CALL.findall(text):
        try:
            call = json.loads(body)
            name, arguments = call["name"], call.get("arguments", {})
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise TypeError("name is a text and arguments an object")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            problems.append(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        else:
            calls.append(ToolCall(name, arguments))
    return calls, problems


def results(texts: Sequence[str]) -> list[Message]:
    """Returns the results as a user's message."""
    return [{"role": "user", "content": "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in texts)}]
