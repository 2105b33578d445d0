"""Conversations of rows as chat messages: speakers, trained turns, reasoning and calls."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from rlhf_host.data.bad_rows import Malformed, check_text, kind_of
from rlhf_host.data.contents import has_pictures
from rlhf_host.data.contents import text_of as text_of_content
from rlhf_host.data.template_writer import REASONING, WITHOUT_TOOLS
from rlhf_host.errors import UserError, near_matches
from rlhf_host.records.episodes import Message

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
    "function_call": "assistant", "observation": "tool", "tool": "tool",
}  # fmt: skip
OTHER_NAMES = {
    **SHAREGPT_ROLES,
    "prompter": "user",
    **dict.fromkeys(("chatgpt", "bing", "bard", "model", "ai", "bot", "tool_call"), "assistant"),
    **dict.fromkeys(("tool_response", "function_response"), "tool"),
}
"""Names of roles in other projects."""
CALLS = ("function_call", "tool_call")
"""Roles whose contents are calls as JSON."""
UNTRAINED = "untrained"
"""The key, set to True, of an assistant's message that is not trained."""
TRAINED_BY = (
    "train", "trained", "trainable", "is_trainable", "training", "train_on", "train_on_turn", "learn", "supervised",
    "loss", "loss_mask", "step_loss_mask", "token_loss_mask", "loss_weight", "loss_scale", "weight",
)  # fmt: skip
"""Keys of messages with which other projects mark a message as trained, with true or 1."""
UNTRAINED_BY = ("mask", "masked", "is_masked", "ignore", "ignore_loss", "no_loss", UNTRAINED)
"""Keys with which they mark it as not trained."""
THOUGHTS = (*REASONING, "thought", "thoughts", "reasoning_text")
REFUSED = {
    **dict.fromkeys(("image", "images", "image_url"), "write pictures as parts of the content, or in a column of the row"),
    **dict.fromkeys(("video", "videos", "audio", "audios"), "texts and pictures are read"),
    **dict.fromkeys(("train_detail", "training_detail"), "parts of a message are not marked here: cut it into messages"),
    **dict.fromkeys(("reasoning_details", "thinking_blocks"), "write the thoughts as a text under 'reasoning_content'"),
    **dict.fromkeys(
        ("prefix", "partial"), "a message for the model to continue is not an answer: end the conversation before it"
    ),
    "refusal": "write it as the content",
    **dict.fromkeys(("tools", "functions"), "give them in a column of the row"),
}
"""Keys of messages that are not honoured, and what to do instead."""
ARGUMENTS = ("arguments", "parameters", "input", "args")
"""Names of a call's arguments, the usual one first."""
OPEN_ENDED = ("eot", "end_turn")
"""Keys of messages whose value false means that the turn does not end."""
_MARKS = frozenset((*TRAINED_BY, *UNTRAINED_BY))
_TRUTH = {"true": True, "1": True, "1.0": True, "yes": True, "false": False, "0": False, "0.0": False, "no": False}
_UNUSUAL = _MARKS | {*THOUGHTS, *REFUSED, *OPEN_ENDED, "function_call", "tool_calls"}
_SHOWN = 60
_MAPPINGS = re.compile(r"""(?:\[\s*)?\{\s*(["'])\w+\1\s*:""")
_OPEN, _CLOSE = "<tool_response>", "</tool_response>"
_MESSAGES = re.compile(r"""\[\s*\{\s*(["'])(?:role|content|from|value)\1\s*:""")


def as_list(value: Any) -> Any:
    """Returns a conversation, or one message, from the text that a table holds (JSON or a Python literal); anything else
    unchanged.

    Raises ``Malformed`` for a text that is neither.
    """
    if not isinstance(value, str) or not _MAPPINGS.match(value):
        return value
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            found = read(value)
            first = found[0] if isinstance(found, list) else found
            keys = first.keys() if isinstance(first, Mapping) else set()
            return found if keys >= {"from", "value"} or ("role" in keys and keys & {"content", "tool_calls"}) else value
    if value[:1] == "{" or not _MESSAGES.match(value):  # a text may look like this
        return value
    raise Malformed(f"a list of messages as a text, and neither JSON nor Python's: write it as JSON: {value[:_SHOWN]!r}")


def messages_of(value: Any, key: str, ignore: Collection[str] = (), roles: Collection[str] | None = ROLES) -> list[Message]:
    """Returns messages with ``role`` and ``content``, or ``from`` and ``value``; untrained ones are marked as ``UNTRAINED``.

    Args:
        key: their column, for messages.
        ignore: keys that are not read.
        roles: the known roles; None: any.

    Raises ``Malformed`` for a value that is not a conversation, and for keys whose meaning cannot be honoured.
    """
    value = as_list(value)
    if not isinstance(value, list):
        raise Malformed(f"{key!r} must be a list of messages, not {kind_of(value)}")
    if not value:
        raise Malformed(f"{key!r} has no messages")
    read = (_any_message(message, number, key, ignore, roles) for number, message in enumerate(value))
    return [each for message in read for each in _unwrapped(message)]


def _unwrapped(message: Message) -> list[Message]:
    """Returns a tool's message without the tags of Hermes around its results, which chat templates write: a message for each."""
    content = message["content"]
    if message["role"] != "tool" or not isinstance(content, str) or _OPEN not in content:
        return [message]
    *parts, rest = map(str.strip, content.split(_CLOSE))
    if rest or not all(part.startswith(_OPEN) and part.count(_OPEN) == 1 for part in parts):
        return [message]
    return [{**message, "content": part.removeprefix(_OPEN).strip()} for part in parts]


def _any_message(message: Any, number: int, key: str, ignore: Collection[str], roles: Collection[str] | None) -> Message:
    if isinstance(message, Mapping) and "from" in message and "role" not in message:
        return sharegpt_message(message, f"{key}[{number}]", ignore)
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise Malformed(f'{key!r}: message {number + 1} must be {{"role": ..., "content": ...}}')
    role = message["role"]
    which = f"{key!r}: message {number + 1} ({role})"
    if role not in ROLES:
        plain = role.lower()
        if plain in CALLS:
            return sharegpt_message({**message, "from": plain, "value": message.get("content")}, f"{key}[{number}]", ignore)
        if (plain := OTHER_NAMES.get(plain, plain)) in ROLES:
            message, role = {**message, "role": plain}, plain
    if roles is not None and role not in roles:
        raise Malformed(f"{which} has an unknown role{near_matches(role, roles)}; known are {', '.join(roles)}")
    return _message(message, which, key, ignore)


def sharegpt_message(message: Any, key: str, ignore: Collection[str] = ()) -> Message:
    """Converts a message of ``from`` and ``value``. Raises ``Malformed`` for any other."""
    if not isinstance(message, Mapping) or not isinstance(message.get("from"), str):
        raise Malformed(f'{key!r} must be {{"from": ..., "value": ...}}')
    sender = message["from"]
    role = OTHER_NAMES.get(sender.lower())
    if role is None:
        near = near_matches(sender, SHAREGPT_ROLES)
        raise Malformed(f"{key!r} is from {sender!r}{near}; known are {', '.join(SHAREGPT_ROLES)}")
    known = {name: value for name, value in message.items() if name not in ("from", "value", "role", "content")}
    said: dict[str, Any] = {**known, "role": role, "content": message.get("value")}
    if sender.lower() in CALLS:
        said |= {"content": "", "tool_calls": _written_calls(message.get("value"), key)}
    return _message(said, f"{key!r}", key, ignore)


def _message(message: Mapping[str, Any], which: str, key: str, ignore: Collection[str]) -> Message:
    cleaned = {name: value for name, value in message.items() if value is not None and name not in ignore}
    role, content = message["role"], cleaned.get("content")
    plain = isinstance(content, str) and _UNUSUAL.isdisjoint(cleaned)
    if not plain:
        _refuse_keys(cleaned, which)
        if (calls := _calls_of(cleaned, which)) is not None:
            cleaned["tool_calls"], content = calls, content or ""
        if (reasoning := _thoughts_of(cleaned, which)) is not None:
            cleaned["reasoning_content"] = reasoning
        if isinstance(content, list | tuple):
            content = _content(content, which)
        cleaned["content"] = content
    if has_pictures(content) and role != "assistant":
        check_text(text_of_content(content), key)
        return _marked(cleaned, which)
    if not isinstance(content, str):
        way = ": write it as a text, as by json.dumps" if isinstance(content, Mapping) else ""
        raise Malformed(f"{which} must have a text as content, not {kind_of(content)}{way}")
    if role == "assistant" and not content.strip() and "tool_calls" not in cleaned:
        raise Malformed(f"{which} is empty")
    check_text(content, key)
    return cleaned if plain else _marked(cleaned, which)


def _content(parts: list[Any] | tuple[Any, ...], which: str) -> str | list[Any]:
    """Returns the parts of a content as one text, or as they are if some are pictures."""
    plain = [
        {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else part
        for part in parts
    ]
    try:
        text = text_of_content(plain)
    except UserError as error:
        raise Malformed(f"{which}: {error}") from None
    return plain if has_pictures(plain) else text


def _refuse_keys(message: Mapping[str, Any], which: str) -> None:
    for name in REFUSED.keys() & message.keys():
        if message[name] not in (False, "", [], {}):
            raise Malformed(f"{which} has {name!r}: {REFUSED[name]} (data.ignore {name} leaves it unread)")

    for name in OPEN_ENDED:
        if message.get(name) in (False, 0):
            raise Malformed(
                f"{which} has {name!r} false, and every turn ends here: write it and the next one as one message"
                f" (data.ignore {name} leaves it unread)"
            )


def _marked(message: Message, which: str) -> Message:
    """Returns the message without the marks of other projects, and with the host's own if it is not trained."""
    marks = {name: message.pop(name) for name in (*TRAINED_BY, *UNTRAINED_BY) if name in message}
    said: dict[str, bool] = {}
    for name, value in marks.items():
        truth = _TRUTH.get(value.lower()) if isinstance(value, str) else value if value in (0, 1, True, False) else None
        if truth is None:
            raise Malformed(
                f"{which}: {name!r} must be 0 or 1, or true or false, not {value!r} (data.ignore {name} leaves it unread)"
            )
        if message["role"] == "assistant" or (truth and name in TRAINED_BY):
            said[name] = bool(truth) == (name in TRAINED_BY)
    if message["role"] != "assistant" and said:
        raise Malformed(f"{which} is to be trained, as {next(iter(said))!r} says, and only the assistant's messages can be")
    if len(set(said.values())) > 1:
        raise Malformed(f"{which}: {' and '.join(map(repr, said))} contradict each other about what is trained")
    return {**message, UNTRAINED: True} if False in said.values() else message


def _thoughts_of(message: Message, which: str) -> str | None:
    """Returns the reasoning, from any of its names; none if the content has it too."""
    found = {name: message.pop(name) for name in THOUGHTS if name in message}
    for name, value in found.items():
        if not isinstance(value, str):
            raise Malformed(f"{which}: {name!r} must be a text, not {kind_of(value)} (data.ignore {name} leaves it unread)")
    texts = list(dict.fromkeys(value for value in found.values() if value.strip()))
    if len(texts) > 1:
        raise Malformed(f"{which}: {' and '.join(map(repr, found))} differ: leave one of them unread (data.ignore)")
    content = message.get("content")
    return texts[0] if texts and not (isinstance(content, str) and texts[0].strip() in content) else None


def _calls_of(message: Message, which: str) -> list[dict[str, Any]] | None:
    """Returns the calls of tools, with arguments as mappings. The older ``function_call`` is one call."""
    calls, one = message.pop("tool_calls", None), message.pop("function_call", None)
    if one and calls:
        raise Malformed(f"{which} has both 'tool_calls' and 'function_call': give one of them")
    if not (calls := [one] if one else calls):
        return None
    if message["role"] != "assistant":
        raise Malformed(f"{which} has calls, and only the assistant can call: {WITHOUT_TOOLS}")
    if isinstance(calls, str):
        with contextlib.suppress(ValueError):
            calls = json.loads(calls)
    if not isinstance(calls, list):
        calls = [calls]
    return [_call(call, which) for call in calls]


def _call(call: Any, which: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise Malformed(
            f'{which}: \'tool_calls\' must be a list of {{"type": "function", "function": {{"name": ..., "arguments": ...}}}}'
        )
    function = _with_arguments(function, which)
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    if not isinstance(arguments or {}, Mapping):
        raise Malformed(
            f"{which}: the arguments of {function['name']!r} are no JSON object: {str(function['arguments'])[:_SHOWN]!r}"
        )
    plain = {name: value for name, value in function.items() if value is not None}
    about = (
        {name: value for name, value in call.items() if value is not None and name != "function"} if "function" in call else {}
    )
    return {"type": "function", **about, "function": {**plain, "arguments": dict(arguments or {})}}


def _with_arguments(function: Mapping[str, Any], which: str) -> Mapping[str, Any]:
    """Returns a call whose arguments have the usual name."""
    found = [name for name in ARGUMENTS if function.get(name) is not None]
    if len(found) > 1:
        raise Malformed(f"{which}: the call of {function['name']!r} has both {found[0]!r} and {found[1]!r}: give one of them")
    if not found or found[0] == ARGUMENTS[0]:
        return function
    return {ARGUMENTS[0] if name == found[0] else name: value for name, value in function.items()}


def _written_calls(value: Any, key: str) -> list[dict[str, Any]]:
    """Returns the calls of a message from ``function_call``, which are JSON."""
    try:
        calls = json.loads(value) if isinstance(value, str) else value
        calls = calls if isinstance(calls, list) else [calls]
        functions = [{"name": call["name"], **call} for call in calls]
    except (TypeError, ValueError, KeyError, AttributeError):
        raise Malformed(f'{key!r}: a function_call must be JSON: {{"name": ..., "arguments": ...}}') from None
    return [{"type": "function", "function": function} for function in functions]
