"""``messages``: Anthropic's API. Blocks become messages and the other way round, and the same path answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_host import Message
from rlhf_host.rollouts import Call
from rlhf_server import chat
from rlhf_server.asked import with_unread
from rlhf_server.errors import ApiError, invalid
from rlhf_server.limits import Limits

KNOWN = ("messages", "tools", "system", "stop_sequences")
TOOL = ("name", "description", "input_schema")
"""Fields of a tool that are read."""
REFUSED = {
    "mcp_servers": "servers of tools are the program's own",
    "container": "this server runs no programs",
    "context_management": "a conversation stays as it was sent",
    **dict.fromkeys(("output_format", "output_config"), "tokens come from the run's own distribution"),
}
CHOICES = {"auto": "auto", "none": "none", "any": "required", "tool": "required"}
"""Kinds of ``tool_choice`` → those of chat completions."""
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""Status → kind of error; others are ``invalid_request_error`` below 500, else ``api_error``."""


def plain_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the request with its parameters named as in chat completions. Raises ``ApiError``."""
    for name, why in REFUSED.items():
        if body.get(name):
            raise invalid(name, why)
    choice = body.get("tool_choice")
    if choice is not None and (not isinstance(choice, Mapping) or choice.get("type") not in CHOICES):
        raise invalid("tool_choice", f"an object of the type {', '.join(CHOICES)}")
    plain = {name: value for name, value in body.items() if name not in ("stop_sequences", "tool_choice")}
    plain = with_unread(plain, TOOL)
    if choice is not None:
        plain["tool_choice"] = CHOICES[choice["type"]]
        if choice.get("disable_parallel_tool_use"):
            plain["disable_parallel_tool_use"] = True  # without effect, which its answer says
    stops = body.get("stop_sequences")
    if stops is not None and not isinstance(stops, list):
        raise invalid("stop_sequences", "a list of texts")
    return {**plain, "stop": stops} if stops else plain


def messages_of(body: Mapping[str, Any], limits: Limits) -> list[Message]:
    """Returns the conversation: the system's text, then the messages. Raises ``ApiError`` that names an invalid one."""
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise invalid("messages", "a list of messages")
    if len(given) > limits.messages:
        raise invalid("messages", f"{len(given)} messages; at most {limits.messages}")
    messages = _system(body.get("system"))
    for place, message in enumerate(given):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant"):
            raise invalid(f"messages[{place}]", "an object with a role of user, assistant; system is a parameter of its own")
        blocks = _blocks(message.get("content"), f"messages[{place}].content")
        read = _of_user if role == "user" else _of_assistant
        messages += read(blocks, f"messages[{place}].content")
    return messages


def _system(given: Any) -> list[Message]:
    if given is None or given == "" or given == []:
        return []
    parts = [_text(block, f"system[{place}]") for place, block in enumerate(_blocks(given, "system"))]
    return [{"role": "system", "content": "\n\n".join(part["text"] for part in parts)}]


def _blocks(given: Any, place: str) -> list[dict[str, Any]]:
    blocks = [{"type": "text", "text": given}] if isinstance(given, str) else given
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise invalid(place, "a text or a list of blocks")
    return blocks


def _of_user(blocks: Sequence[dict[str, Any]], place: str) -> list[Message]:
    """Returns a message for each result of a tool, and one with all else."""
    messages: list[Message] = []
    parts = []
    for number, block in enumerate(blocks):
        where = f"{place}[{number}]"
        if block.get("type") == "tool_result":
            content = block.get("content")
            given = [] if content is None else _blocks(content, f"{where}.content")
            inner = [_part(each, f"{where}.content[{inside}]") for inside, each in enumerate(given)]
            if block.get("is_error"):
                inner = [{"type": "text", "text": "Error: "}, *inner]
            if not isinstance(block.get("tool_use_id"), str):
                raise invalid(f"{where}.tool_use_id", "a text")
            messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": _read(inner, where)})
        else:
            parts.append(_part(block, where))
    return [*messages, {"role": "user", "content": _read(parts, place)}] if parts or not messages else messages


def _of_assistant(blocks: Sequence[dict[str, Any]], place: str) -> list[Message]:
    texts, calls = [], []
    for number, block in enumerate(blocks):
        where = f"{place}[{number}]"
        match block.get("type"):
            case "thinking" | "redacted_thinking":
                continue  # its tokens are in the tree
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id"), "function": function})
            case _:
                texts.append(_text(block, where)["text"])
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    return _checked({**message, "tool_calls": calls} if calls else message, place)


def _text(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    if block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise invalid(place, f"a block of the type text; blocks of the type {block.get('type')!r} are not read here")
    return {"type": "text", "text": block["text"]}


def _part(block: dict[str, Any], place: str) -> dict[str, Any]:
    if block.get("type") != "image":
        return _text(block, place)
    source = block.get("source")
    if not isinstance(source, dict) or source.get("type") != "base64":
        raise invalid(f"{place}.source", "a picture in base64: nothing is fetched for others")
    return {"type": "image_url", "image_url": f"data:{source.get('media_type')};base64,{source.get('data')}"}


def _read(parts: Sequence[dict[str, Any]], place: str) -> Any:
    return _checked({"role": "user", "content": list(parts)}, place)[0]["content"]


def _checked(message: dict[str, Any], place: str) -> list[Message]:
    try:
        return chat.messages_of({"messages": [message]}, Limits())
    except ApiError as error:
        where = (error.param or "").removeprefix("messages[0].content").removeprefix("messages[0]")
        raise invalid(f"{place}{where}", error.message.removeprefix(f"{error.param}: ")) from error


def tools_of(body: Mapping[str, Any], limits: Limits) -> list[Mapping[str, Any]] | None:
    """Returns tools in the form of chat completions. Raises ``ApiError`` for tools that a server would have to run."""
    given = body.get("tools")
    given = [] if given is None else given
    if not isinstance(given, list):
        raise invalid("tools", "a list")
    tools = []
    for place, tool in enumerate(given):
        kind = tool.get("type", "custom") if isinstance(tool, dict) else None
        if kind not in ("custom", None) or not isinstance(tool, dict) or not isinstance(tool.get("input_schema"), dict):
            raise invalid(f"tools[{place}]", f"a tool with name and input_schema; the type {kind!r} is not one of them")
        function = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
        tools.append({"type": "function", "function": {**function, "parameters": tool["input_schema"]}})
    return chat.tools_of({"tools": tools, "tool_choice": body.get("tool_choice")}, limits)


def answer_of(calls: Sequence[Call], stops: Sequence[str], model: str, tokenizer: Any) -> dict[str, Any]:
    """Returns the body of an answer that is not streamed, to a request with these stop sequences."""
    call = calls[0]
    reply, answer = call.shown, call.generation
    assert reply is not None
    assert answer is not None
    content: list[dict[str, Any]] = []
    if reply.reasoning:
        content.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
    if reply.content:
        content.append({"type": "text", "text": reply.content})
    for one in reply.tool_calls:
        content.append({"type": "tool_use", "id": one.id, "name": one.name, "input": dict(one.arguments)})
    text = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    # The first in the text ended it; of two that begin there, the shorter one.
    stopped = min((stop for stop in stops if stop in text), key=lambda stop: (text.find(stop), len(stop)), default=None)
    reason = "stop_sequence" if stopped is not None else "max_tokens" if answer.finish_reason == "length" else "end_turn"
    usage = chat.usage_of(calls)
    return {
        "id": f"msg_{call.id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": "tool_use" if reply.tool_calls else reason,
        "stop_sequence": stopped if not reply.tool_calls else None,
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
        "prompt_token_ids": call.prompt_ids,
        "generation_token_ids": list(answer.token_ids),
        "generation_log_probs": list(answer.logprobs),
    }


def chunks_of(answer: Mapping[str, Any], usage: bool) -> list[dict[str, Any]]:
    """Returns the same as events, each block whole."""
    begun = {
        **answer,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**answer["usage"], "output_tokens": 0},
    }
    events: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    for index, block in enumerate(answer["content"]):
        empty, delta = _delta(block)
        events += [
            {"type": "content_block_start", "index": index, "content_block": empty},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    ended = {name: answer[name] for name in ("stop_reason", "stop_sequence")}
    return [*events, {"type": "message_delta", "delta": ended, "usage": answer["usage"]}, {"type": "message_stop"}]


def _delta(block: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a block without its content, and this content."""
    match block["type"]:
        case "text":
            return {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        case "thinking":
            return {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
        case _:
            arguments = chat.wire_arguments(block["input"])
            return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": arguments}


def error_of(error: ApiError) -> dict[str, Any]:
    """Returns an error in the form that Anthropic's clients read."""
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    told = {"type": kind, "message": error.message, "code": error.code, "param": error.param}
    return {"type": "error", "error": told}
