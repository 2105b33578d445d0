"""How models write tool calls and reasoning, as response templates of transformers' ``parse_response``.

A tokenizer that has a response template of its own is read by that. These are for the many that have none; which one fits is seen
from the chat template, which writes earlier calls in the same form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CALL = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}}
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_REASONING = {"open": "<think>", "close": "</think>"}
_JSON_VALUE = {"name": "json", "args": {"allow_non_json": True}}

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
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
            "value_parser": _JSON_VALUE,
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
            "value_parser": _JSON_VALUE,
        },
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
"""The field ``tool_calls`` of each; the names are those of ``rollout.tool_format``, beside ``auto`` and ``none``."""

_MARKS = (
    ("glm", ("<tool_call>", "<arg_key>")),
    ("xml", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama3_json", ('"parameters": ', "<|start_header_id|>")),
)


def detect(chat_template: str) -> str:
    """The format that a chat template writes, ``none`` if it is none of these."""
    return next((name for name, marks in _MARKS if all(mark in chat_template for mark in marks)), "none")


def response_template(name: str, opening: str, *, tools: bool) -> dict[str, Any]:
    """A response template for ``name``.

    Args:
        opening: what the chat template writes before an answer; it may have begun the reasoning.
        tools: whether calls are read too.
    """
    fields: dict[str, Any] = {"content": {}, "reasoning_content": _REASONING}
    if tools and name in FORMATS:
        fields["tool_calls"] = FORMATS[name]
    anchor = opening.partition("<think>")[0].rstrip() or "\0"
    return {"fields": fields, "start_anchor": anchor}
