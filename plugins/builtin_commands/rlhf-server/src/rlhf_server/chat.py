"""``chat/completions``: messages in, messages out."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_host import Message, Picture, ToolCall, UserError
from rlhf_host.rollouts import Call
from rlhf_server.errors import invalid
from rlhf_server.likelihoods import Scored
from rlhf_server.limits import Limits

KNOWN = ("messages", "tools")
_ROLES = ("system", "developer", "user", "assistant", "tool")


def messages_of(body: Mapping[str, Any], limits: Limits) -> list[Message]:
    """Returns the messages. Raises ``ApiError`` that names the first invalid one."""
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise invalid("messages", "a list of messages")
    if len(given) > limits.messages:
        raise invalid("messages", f"{len(given)} messages; at most {limits.messages}")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(given)]


def _message(given: Any, place: str) -> Message:
    if not isinstance(given, dict) or given.get("role") not in _ROLES:
        raise invalid(place, f"an object with a role of {', '.join(_ROLES)}")
    role = "system" if given["role"] == "developer" else given["role"]
    if "content" not in given and role in ("system", "user"):
        raise invalid(f"{place}.content", "missing: a text or a list of parts")
    message: Message = {"role": role, "content": _content(given.get("content"), f"{place}.content")}
    if role == "assistant" and not isinstance(message["content"], str):
        raise invalid(f"{place}.content", "a text: the assistant shows no pictures")
    if calls := given.get("tool_calls"):
        if not isinstance(calls, list):
            raise invalid(f"{place}.tool_calls", "a list")
        message["tool_calls"] = [_call(call, f"{place}.tool_calls[{number}]") for number, call in enumerate(calls)]
    for name in ("tool_call_id", "name", "reasoning_content", "reasoning"):
        if isinstance(given.get(name), str):
            message[name] = given[name]
    return message


def _content(content: Any, place: str) -> str | list[dict[str, Any]]:
    """Returns one text, or parts if some are pictures."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid(place, "a text or a list of parts, which are texts and pictures")
    parts: list[dict[str, Any]] = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image_url", "input_image"):
            parts.append(_picture(part, f"{place}[{number}].image_url"))
            continue
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise invalid(
                f"{place}[{number}]", f"a text or a picture; nothing here reads parts of the type {kind or type(part).__name__}"
            )
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise invalid(f"{place}[{number}].text", "a text")
        parts.append({"type": "text", "text": text})
    return parts if any(part["type"] == "image" for part in parts) else "".join(part["text"] for part in parts)


def _picture(part: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns a picture of a request, which is in the request itself: a server reads no files and no addresses for others."""
    given = part.get("image_url")
    uri = given.get("url") if isinstance(given, dict) else given
    if not isinstance(uri, str) or not uri.startswith("data:"):
        raise invalid(place, "a data URI, data:image/png;base64,...")
    try:
        return {"type": "image", "image": Picture.of_uri(uri)}
    except UserError as error:
        raise invalid(place, str(error)) from error


def _call(given: Any, place: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(place, "an object with a function that has a name")
    arguments = function.get("arguments") or "{}"
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
        json.dumps(read)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{place}.function.arguments", f"JSON: {error}") from error
    if not isinstance(read, dict):
        raise invalid(f"{place}.function.arguments", "a JSON object")
    return {"id": str(given.get("id") or ""), "type": "function", "function": {"name": function["name"], "arguments": read}}


def tools_of(body: Mapping[str, Any], limits: Limits) -> list[Mapping[str, Any]] | None:
    given = body.get("tools")
    if given is not None and (not isinstance(given, list) or len(given) > limits.tools):
        raise invalid("tools", f"a list of at most {limits.tools} tools")
    if not given or body.get("tool_choice") == "none":
        return None
    for place, tool in enumerate(given):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type", "function") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise invalid(f"tools[{place}]", "an object of the type function, whose function has a name")
    return [{**tool, "type": "function"} for tool in given]


def message_of(call: Call, tokenizer: Any) -> dict[str, Any]:
    """Returns the answer with its tokens."""
    reply, answer = call.shown, call.generation
    assert reply is not None
    assert answer is not None
    message: dict[str, Any] = {"role": "assistant", "content": reply.content or (None if reply.tool_calls else "")}
    if reply.tool_calls:
        message["tool_calls"] = [wire_call(one) for one in reply.tool_calls]
    if reply.reasoning:
        message["reasoning_content"] = message["reasoning"] = reply.reasoning
    message["prompt_token_ids"] = call.prompt_ids
    message["generation_token_ids"] = list(answer.token_ids)
    message["generation_log_probs"] = list(answer.logprobs)
    return message


def wire_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": wire_arguments(call.arguments)}}


def wire_arguments(arguments: Mapping[str, Any]) -> str:
    return json.dumps(dict(arguments), ensure_ascii=False)


def finish_of(call: Call) -> str:
    assert call.generation is not None
    if call.shown is not None and call.shown.tool_calls:
        return "tool_calls"
    return "length" if call.generation.finish_reason == "length" else "stop"


def usage_of(calls: Sequence[Call]) -> dict[str, int]:
    prompt, said = calls[0].begins, sum(call.ends - call.begins for call in calls)
    return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}


def name_of(tokenizer: Any, *, as_ids: bool) -> Callable[[int], str]:
    """Returns the function from a token to its text, or to the form in which clients ask for its id."""

    @functools.cache
    def name(token: int) -> str:
        return f"token_id:{token}" if as_ids else str(tokenizer.decode([token]))

    return name


def logprobs_of(call: Call, name: Callable[[int], str], scored: Scored | None = None) -> dict[str, Any]:
    """Returns log-probabilities of an answer: those of ``scored``, or those of the distribution that was sampled."""
    assert call.generation is not None
    tokens = call.generation.token_ids
    logprobs = call.generation.logprobs if scored is None else scored.logprobs
    content = []
    for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        top = [] if scored is None else [_named(name(one), value) for one, value in (scored.top[place] or {}).items()]
        content.append({**_named(name(token), logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _named(text: str, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}


def answer_of(
    calls: Sequence[Call], body: Mapping[str, Any], model: str, tokenizer: Any, scored: Sequence[Scored] | None = None
) -> dict[str, Any]:
    """Returns the body of an answer that is not streamed."""
    choices, name = [], name_of(tokenizer, as_ids=bool(body.get("return_tokens_as_token_ids")))
    for place, call in enumerate(calls):
        assert call.generation is not None
        logprobs = logprobs_of(call, name, None if scored is None else scored[place]) if body.get("logprobs") else None
        choice = {
            "index": place,
            "message": message_of(call, tokenizer),
            "finish_reason": finish_of(call),
            "logprobs": logprobs,
        }
        if body.get("return_token_ids"):
            choice["token_ids"] = list(call.generation.token_ids)
        choices.append(choice)
    answer = {"id": calls[0].id, "object": "chat.completion", "created": int(time.time()), "model": model}
    if body.get("return_token_ids"):
        answer["prompt_token_ids"] = calls[0].prompt_ids
    return {**answer, "choices": choices, "usage": usage_of(calls)}


def chunks_of(answer: Mapping[str, Any], usage: bool) -> list[dict[str, Any]]:
    """Returns the same as events: every message whole, then its end, and the usage if it was requested."""
    head = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks = []
    for choice in answer["choices"]:
        delta = dict(choice["message"])
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
        place = {"index": choice["index"], "logprobs": choice["logprobs"]}
        chunks.append({**head, "choices": [{**place, "delta": delta, "finish_reason": None}]})
        end = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": None}
        chunks.append({**head, "choices": [end]})
    if usage:
        chunks.append({**head, "choices": [], "usage": answer["usage"]})
    return chunks
