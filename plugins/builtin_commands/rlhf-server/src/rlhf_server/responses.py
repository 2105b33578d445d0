"""``responses``: the part of OpenAI's newer API that agent frameworks use. Items become messages, and the same path answers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_host import Message
from rlhf_host.rollouts import Call
from rlhf_server import asked, chat, likelihoods
from rlhf_server.errors import ApiError, invalid
from rlhf_server.likelihoods import Scored, Wanted
from rlhf_server.limits import Limits

FUNCTION = ("name", "description", "parameters", "strict")
"""Fields of a tool that its function has in chat completions, so that both write the same prompt."""
LOGPROBS = "message.output_text.logprobs"
"""Value of ``include`` that asks for log-probabilities."""
WITHOUT_EFFECT = (
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
)
"""Values of ``include`` that ask for parts that no answer has here."""
KNOWN = ("input", "instructions", "tools", "previous_response_id", "include", "reasoning", "text", "truncation")


def messages_of(body: Mapping[str, Any], before: Sequence[Message], limits: Limits) -> list[Message]:
    """Returns the conversation: instructions, earlier messages, and the input's items. Raises ``ApiError`` that names an
    invalid one.

    Args:
        before: conversation of the response that ``previous_response_id`` names, without its instructions.
    """
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not (items or before):
        raise invalid("input", "a text or a list of items")
    messages = list(before)
    for place, item in enumerate(items):
        _append(messages, item, f"input[{place}]")
    instructions = body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise invalid("instructions", "a text")
    if len(messages) > limits.messages:
        raise invalid("input", f"{len(messages)} messages; at most {limits.messages}")
    return [{"role": "system", "content": instructions}, *messages] if instructions else messages


def _append(messages: list[Message], item: Any, place: str) -> None:
    if not isinstance(item, dict):
        raise invalid(place, "an object")
    match item.get("type", "message"):
        case "reasoning":
            return  # its tokens are in the tree
        case "message":
            [message] = chat.messages_of({"messages": [item]}, Limits())
            messages.append(message)
        case "function_call":
            name, arguments = item.get("name"), item.get("arguments")
            wire = {"id": item.get("call_id"), "function": {"name": name, "arguments": arguments}}
            [read] = chat.messages_of({"messages": [{"role": "assistant", "tool_calls": [wire]}]}, Limits())
            if messages and messages[-1]["role"] == "assistant":
                messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", []), *read["tool_calls"]]}
            else:
                messages.append(read)
        case "function_call_output":
            output = item.get("output")
            [read] = chat.messages_of({"messages": [{"role": "user", "content": output}]}, Limits())
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": read["content"]})
        case kind:
            raise invalid(f"{place}.type", f"message, function_call, function_call_output or reasoning, not {kind!r}")


def tools_of(body: Mapping[str, Any], limits: Limits) -> list[Mapping[str, Any]] | None:
    """Returns function tools in the form of chat completions. Raises ``ApiError`` for tools that a server would have to run."""
    given = body.get("tools")
    given = [] if given is None else given
    if not isinstance(given, list):
        raise invalid("tools", "a list")
    tools = []
    for place, tool in enumerate(given):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise invalid(f"tools[{place}]", "a tool of the type function")
        function = {name: tool[name] for name in FUNCTION if tool.get(name) is not None}
        tools.append({"type": "function", "function": function})
    return chat.tools_of({"tools": tools, "tool_choice": body.get("tool_choice")}, limits)


def previous_of(body: Mapping[str, Any], known: Mapping[str, list[Message]]) -> list[Message]:
    """Returns the conversation of ``previous_response_id``. Raises ``ApiError`` for one that this episode does not have."""
    previous = body.get("previous_response_id")
    if previous is None:
        return []
    if not isinstance(previous, str) or previous not in known:
        raise ApiError(404, f"there is no response {previous!r} in this episode", "not_found", "previous_response_id")
    return known[str(previous)]


def wanted_of(body: Mapping[str, Any], *, computed: bool) -> Wanted:
    """Returns the log-probabilities that ``include`` and ``top_logprobs`` ask for. Raises ``ApiError``; see
    ``likelihoods.wanted_of``.
    """
    include = body.get("include")
    if include is not None and (not isinstance(include, list) or not all(isinstance(one, str) for one in include)):
        raise invalid("include", "a list of texts")
    if unknown := [one for one in include or () if one not in (LOGPROBS, *WITHOUT_EFFECT)]:
        raise invalid("include", f"{unknown[0][:80]!r} is not known; {LOGPROBS!r} is")
    logprobs = bool(body.get("top_logprobs")) or LOGPROBS in (include or ())
    return likelihoods.wanted_of({**body, "logprobs": logprobs}, "chat", computed=computed)


def with_unread(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the request with a parameter for each part of its tools and of ``include`` that has no effect."""
    parts = {f"include.{one}": True for one in body.get("include") or () if one in WITHOUT_EFFECT}
    return {**asked.with_unread(body, FUNCTION), **parts}


def answer_of(
    calls: Sequence[Call],
    body: Mapping[str, Any],
    model: str,
    tokenizer: Any,
    wanted: Wanted,
    scored: Sequence[Scored] | None = None,
) -> dict[str, Any]:
    """Returns the body of an answer that is not streamed, with the log-probabilities that are wanted: those of ``scored``, or
    those of the distribution that was sampled.
    """
    call = calls[0]
    reply, answer = call.shown, call.generation
    assert reply is not None
    assert answer is not None
    cut = answer.finish_reason == "length"
    status = "incomplete" if cut else "completed"
    output: list[dict[str, Any]] = []
    if reply.reasoning:
        content = [{"type": "reasoning_text", "text": reply.reasoning}]
        output.append({"type": "reasoning", "id": f"rs_{call.id}", "summary": [], "content": content})
    if reply.content or not reply.tool_calls:
        part: dict[str, Any] = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
        if wanted.logprobs:
            name = chat.name_of(tokenizer, as_ids=False)
            part["logprobs"] = chat.logprobs_of(call, name, None if scored is None else scored[0])["content"]
        output.append({"type": "message", "id": f"msg_{call.id}", "role": "assistant", "status": status, "content": [part]})
    for one in reply.tool_calls:
        wire = chat.wire_call(one)
        called = {"type": "function_call", "id": f"fc_{one.id}", "call_id": one.id, "status": "completed"}
        output.append({**called, "name": one.name, "arguments": wire["function"]["arguments"]})
    usage = chat.usage_of(calls)
    return {
        "id": f"resp_{call.id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "model": model,
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "top_p": None,
        "truncation": "disabled",
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
        "prompt_token_ids": call.prompt_ids,
        "generation_token_ids": list(answer.token_ids),
        "generation_log_probs": list(answer.logprobs),
    }


def chunks_of(answer: Mapping[str, Any], usage: bool) -> list[dict[str, Any]]:
    """Returns the same as events, each item whole."""
    begun = {**answer, "status": "in_progress", "output": [], "usage": None}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for place, item in enumerate(answer["output"]):
        where = {"output_index": place, "item_id": item["id"]}
        empty = {**item, "status": "in_progress", "content": []} if item["type"] == "message" else item
        events.append({"type": "response.output_item.added", "output_index": place, "item": empty})
        if item["type"] == "message":
            [part] = item["content"]
            inner = {**where, "content_index": 0}
            events += [
                {"type": "response.content_part.added", **inner, "part": {**part, "text": ""}},
                {"type": "response.output_text.delta", **inner, "delta": part["text"], "logprobs": []},
                {"type": "response.output_text.done", **inner, "text": part["text"], "logprobs": []},
                {"type": "response.content_part.done", **inner, "part": part},
            ]
        if item["type"] == "function_call":
            arguments = item["arguments"]
            events += [
                {"type": "response.function_call_arguments.delta", **where, "delta": arguments},
                {"type": "response.function_call_arguments.done", **where, "name": item["name"], "arguments": arguments},
            ]
        events.append({"type": "response.output_item.done", "output_index": place, "item": item})
    end = "response.incomplete" if answer["status"] == "incomplete" else "response.completed"
    events.append({"type": end, "response": dict(answer)})
    numbers = itertools.count()
    return [{**event, "sequence_number": next(numbers)} for event in events]
