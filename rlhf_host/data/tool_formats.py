"""Formats of tool calls and reasoning of models, as response templates of transformers' ``parse_response``.

If a tokenizer has its own response template, that one is used. These are for the many that have none. The right one is found
from the chat template, which writes earlier calls in the same form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CALL = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}}
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_REASONING = {"open": "<think>", "close": "</think>", "repeats": True, "join": "\n"}
_TEXT = {"repeats": True, "join": "\n"}
_VALUE = {"name": "text", "args": {"strip": False}}
"""Types are read from the tool's schema, because ``75001`` may be a number or a text."""

FORMATS: Mapping[str, Mapping[str, Any]] = {
    "hermes": {
        "open": "<tool_call>",
        "close": "</tool_call>",
        "content": "json",
        "repeats": True,
        "transform": _CALL,
    },
    "xml": {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?(?:</parameter>|\Z)",
            "value_parser": _VALUE,
        },
        "repeats": True,
        "transform": _NAMED,
    },
    "glm": {
        "open_pattern": r"<tool_call>(?P<name>[^<\n]+)",
        "close": "</tool_call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
            "value_parser": _VALUE,
        },
        "repeats": True,
        "transform": _NAMED,
    },
    "gptoss": {
        "open_pattern": r"(?:<\|channel\|>commentary )?to=functions\.(?P<name>[^\s<]+)[^\n]{0,80}?<\|message\|>",
        "close_pattern": r"<\|call\|>|<\|end\|>",
        "content": "json",
        "repeats": True,
        "transform": _NAMED,
    },
    "mistral": {
        "open": "[TOOL_CALLS]",
        "close_pattern": r"$(?!.)",
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
        "transform_each": True,
    },
    "llama3_json": {
        "open_pattern": r'(?:<\|python_tag\|>)?(?=\{\s*"(?:name|type)"\s*:)',
        "close_pattern": r"$(?!.)",
        "content": "json",
        "repeats": True,
        "transform": {
            "type": "function",
            "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
        },
    },
}
"""Value of the field ``tool_calls`` in each format; the names are those of ``rollout.tool_format``, beside ``auto`` and
``none``.
"""

_MARKS = (
    ("gptoss", ("<|channel|>commentary", "functions.")),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("xml", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama3_json", ('"parameters": ', "<|start_header_id|>")),
)


def detect(chat_template: str) -> str:
    """Returns the format that a chat template writes, ``none`` if it is none of these."""
    return next((name for name, marks in _MARKS if all(mark in chat_template for mark in marks)), "none")


_CHANNELS = {
    "reasoning_content": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
    "content": {
        "open_pattern": r"<\|channel\|>(?:final|commentary)<\|message\|>",
        "close_pattern": r"<\|end\|>|<\|return\|>",
    },
}
"""Channels of gpt-oss, which writes each part of an answer into one."""


def without_calls(template: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a response template that leaves calls as text."""
    return {**template, "fields": {name: field for name, field in template["fields"].items() if name != "tool_calls"}}


def check_ended(name: str, text: str) -> None:
    """Raises ``ValueError`` for a last call without its end, if the format itself does not show that it was cut."""
    if name in ("xml", "glm") and "</tool_call>" not in text.rpartition("<tool_call>")[2]:
        raise ValueError("a call without an end")


def response_template(name: str, opening: str, *, tools: bool) -> dict[str, Any]:
    """Returns a response template for ``name``.

    Args:
        opening: text of the chat template before an answer; it may begin the reasoning.
        tools: True if calls are read too.
    """
    fields: dict[str, Any] = {"content": _TEXT, "reasoning_content": _REASONING}
    if name == "gptoss":
        fields = {part: {**_TEXT, **marks} for part, marks in _CHANNELS.items()}
    if tools and name in FORMATS:
        fields["tool_calls"] = FORMATS[name]
    anchor = opening.partition("<think>")[0].rstrip() or "\0"
    return {"fields": fields, "start_anchor": anchor}
