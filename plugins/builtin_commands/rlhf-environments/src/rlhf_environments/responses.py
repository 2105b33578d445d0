"""Outputs of the Responses API, as NeMo Gym sends them, as messages, and tasks as its rows. It needs the standard library alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TASK, SEED, SAMPLE = "rlhf_task", "rlhf_seed", "rlhf_sample"
"""Keys of a row: index of the task, and where an episode's random numbers come from if they are fixed."""


def messages_of_output(output: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns items as messages of OpenAI's chat completions: what the policy said up to a tool's result is one message.

    Raises ``ValueError`` for an item that is not known.
    """
    messages: list[dict[str, Any]] = []
    for item in output:
        kind = item.get("type", "message")
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _text(item.get("output"))})
        elif kind == "message" and item.get("role") != "assistant":
            messages.append({"role": str(item.get("role")), "content": _text(item.get("content"))})
        elif kind in ("message", "function_call", "reasoning"):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            last = messages[-1]
            if kind == "message":
                last["content"] += _text(item.get("content"))
            elif kind == "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
                last.setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "function", "function": function})
        else:
            raise ValueError(f"an output of the type {kind!r} cannot be judged")
    return messages


def truncated(response: Mapping[str, Any]) -> bool:
    """Returns True if the last answer was cut at its limit."""
    return bool(response.get("incomplete_details")) or response.get("status") == "incomplete"


def failure_of(response: Mapping[str, Any]) -> str | None:
    """Returns why a response is no answer, and None for one that can be judged."""
    error, status = response.get("error"), response.get("status")
    if error or status in ("failed", "cancelled"):
        reason = error.get("message") if isinstance(error, Mapping) else error
        return f"the response failed ({status}): {reason or 'no error is told'}"
    last: list[str] = []
    for item in reversed(response["output"]):
        if item.get("type") == "function_call_output" or item.get("role", "assistant") != "assistant":
            break
        last.append(item.get("type", "message"))
    if not response["output"] or (last and {*last} == {"reasoning"} and not truncated(response)):
        return "the response has no answer to judge: its output ends without a message"
    return None


def row_of(task: int, turn: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the row of a task whose episode begins with this turn."""
    functions = [tool.get("function", tool) for tool in turn["tools"]]
    tools = [
        {
            "type": "function",
            "name": function["name"],
            "description": function.get("description", ""),
            "parameters": function.get("parameters") or {"type": "object", "properties": {}},
            "strict": False,
        }
        for function in functions
    ]
    inputs = [{"role": message["role"], "content": _text(message.get("content"))} for message in turn["messages"]]
    return {"responses_create_params": {"input": inputs, **({"tools": tools} if tools else {})}, TASK: task}


def same_input(shown: Any, turn: Mapping[str, Any]) -> bool:
    """Returns True if a row's input is what an episode shows first; a text is one user's message."""
    items = [{"role": "user", "content": shown}] if isinstance(shown, str) else shown
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        return False
    said = [(item.get("role"), _text(item.get("content"))) for item in items]
    return said == [(message["role"], _text(message.get("content"))) for message in turn["messages"]]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content or ())
