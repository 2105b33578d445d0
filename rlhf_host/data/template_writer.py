"""Writing of conversations in a chat template: in the form of contents, calls and thoughts that it accepts, and without loss."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from rlhf_host.data.contents import has_pictures, text_items, text_of, texts_of
from rlhf_host.data.templates import apply_template, for_row
from rlhf_host.errors import UserError
from rlhf_host.records.episodes import Message

Tools = Sequence[Mapping[str, Any]]

MEMO = 4096
"""Maximum number of remembered conversation shapes; conversations with tools have as many shapes as there are episodes."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names under which templates read thoughts; a message gets them under all names."""
SHOWN = ("name", "channel", "recipient", "tool_plan")
"""Fields for the speaker, the recipient or the purpose, beside the role. Results of tools have the tool's name, which most
templates leave out.
"""
_FORMED, _NAMED = frozenset((*REASONING, "tool_calls")), frozenset(SHOWN)
_TAGS = re.compile(r"</?think(?:ing)?>|\[/?THINK\]|/(?:no_?)?think\b|/system_override")
"""Marks of thoughts, and directives, that templates write in their own way."""
NO_ID = "call00000"
"""Id for calls and results that have none: Mistral's templates require nine letters or digits."""
RESULTS = ("tool", "function", "ipython")
WITHOUT_TOOLS = (
    "put the tools into the system prompt and their results into user messages (as agents with that option do:"
    " --agent.tool-format text)"
)
"""Advice for chat templates that have no tools."""


class TemplateWriter:
    """Writes conversations in a tokenizer's chat template, and finds what the template leaves out.

    The accepted forms are found by trying, because no metadata tells them: contents as texts or as lists of parts, arguments of
    calls as mappings or as JSON. Losses are found with marks in place of contents, names and thoughts. A conversation of the
    same shape is not tried again.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.mark = "m" + uuid.uuid4().hex  # no text of a conversation has it
        self._whole: set[Any] = set()
        self._json: bool | None = None
        self._told: dict[str, TemplateWriter] = {}

    def told(self, values: Mapping[str, Any]) -> TemplateWriter:
        """Returns the writer whose template also gets these values. Raises ``UserError`` for one that it does not read."""
        if not values:
            return self
        key = json.dumps(values, sort_keys=True, default=str)
        if key not in self._told:
            if len(self._told) >= MEMO:
                self._told.clear()
            self._told[key] = TemplateWriter(for_row(self.tokenizer, values))
        return self._told[key]

    def write(self, messages: Sequence[Message], *, opens: bool, tools: Tools | None = None) -> str:
        """Returns the template's text, with the opening of an answer if ``opens``. Raises ``UserError`` for messages that it
        refuses.
        """
        in_parts = self._lists_contents
        as_it_is = [not in_parts and _is_plain(message) and message["role"] != "tool" for message in messages]
        shaped = [one if plain else self._in_form(one) for one, plain in zip(messages, as_it_is, strict=True)]
        return apply_template(self.tokenizer, shaped, add_generation_prompt=opens, tools=tools)

    def _in_form(self, message: Message) -> Message:
        if message.get("tool_calls") and self._json is None:
            self._json = self._takes_json()
        return _in_form(message, bool(self._json), self._lists_contents)

    @cached_property
    def _lists_contents(self) -> bool:
        """True if contents must be lists of parts: some templates of models that see images lose a plain text."""
        for in_parts in (False, True):
            message = _in_form({"role": "user", "content": self.mark}, False, in_parts)
            with contextlib.suppress(UserError):
                if self.mark in apply_template(self.tokenizer, [message], add_generation_prompt=True):
                    return in_parts
        return False

    def _takes_json(self) -> bool:
        """Returns True if arguments must be a text: a template may refuse mappings, or write them as Python does."""
        function = {"name": "f", "arguments": {"m": self.mark}}
        call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        for as_json in (False, True):
            talk = [_in_form(each, as_json, self._lists_contents) for each in ({"role": "user", "content": "x"}, call)]
            with contextlib.suppress(UserError):
                text = apply_template(self.tokenizer, talk, add_generation_prompt=False)
                if self.mark in text and f"'{self.mark}'" not in text:
                    return as_json
        return False

    # --- what is left out -----------------------------------------------------------------------------

    def refuse_losses(
        self, messages: Sequence[Message], tools: Tools | None = None, *, opens: bool, words_alone: bool = False
    ) -> None:
        """Raises ``UserError`` for a message, a call, a tool, thoughts or a name that the template does not write.

        Many templates leave out thoughts of earlier turns, and words beside their calls, by design. So it is enough that these
        are written while their turn is the last. Messages before an answer may be written in its prompt alone, like the system
        message in Mistral's.

        Args:
            words_alone: thoughts and names do not matter.
        """
        shape = (tuple(map(_shape, messages)), len(tools or ()), opens, words_alone)
        if shape in self._whole:
            return
        for number, message in enumerate(messages[:-1] if not opens else messages, start=1):
            if reasoning_of(message) and not words_alone:
                self.refuse_losses(messages[:number], tools, opens=False)
        numbers = itertools.count()
        marked = [self.all_marked(message, numbers) for message in messages]
        renamed: list[Mapping[str, Any]] = [_renamed(tool, self._next(numbers)) for tool in tools or ()]
        try:
            text = self.write(marked, opens=opens, tools=renamed or None)
        except UserError:  # a template may want certain contents
            marked, renamed, text = list(messages), list(tools or ()), self.write(messages, opens=opens, tools=tools)
        if lost := [_name_of(tool) for tool, other in zip(tools or (), renamed, strict=True) if _name_of(other) not in text]:
            which = "tools" if len(lost) == len(renamed) else f"the tool {lost[0]!r}"
            raise UserError(
                f"the chat template leaves out {which}: {WITHOUT_TOOLS}; data.ignore tools leaves those of rows unread"
            )
        for number, message in enumerate(marked, start=1):
            thoughts = number == len(marked) and not opens
            problem = _loss(message, text)
            if problem is None and not words_alone:
                problem = _lost_with(message, text, thoughts=thoughts)
            if problem is not None:
                last = number == len(marked) and not opens
                if not (last or opens) and self._is_whole(messages[:-1], tools, words_alone, opens=True):
                    continue
                if (
                    message.get("tool_calls")
                    and not last
                    and self._is_whole(messages[:number], tools, words_alone, opens=False)
                ):
                    continue
                what, way = problem
                raise UserError(f"the chat template leaves out {what}message {number} ({message['role']}): {way}")
        self._refuse_mistaken(marked, text, opens, renamed)
        if len(self._whole) >= MEMO:
            self._whole.clear()
        self._whole.add(shape)

    def _is_whole(self, messages: Sequence[Message], tools: Tools | None, words_alone: bool, *, opens: bool) -> bool:
        with contextlib.suppress(UserError):
            self.refuse_losses(messages, tools, opens=opens, words_alone=words_alone)
            return True
        return False

    def _refuse_mistaken(self, marked: Sequence[Message], text: str, opens: bool, tools: Tools) -> None:
        """Raises ``UserError`` for a role whose words would be the assistant's."""

        def as_assistant(role: str) -> str | None:
            changed = [{**message, "role": "assistant"} if message["role"] == role else message for message in marked]
            with contextlib.suppress(UserError):
                return self.write(changed, opens=opens, tools=tools or None)
            return None

        others = {message["role"] for message in marked if message.get("content")} - {"user", "assistant"}
        found = next((role for role in sorted(others) if as_assistant(role) == text), None)
        if found is not None and as_assistant("user") != text:
            raise UserError(
                f"the chat template writes messages of the role {found!r} as the assistant's: give them another role"
            )

    def _next(self, numbers: Iterator[int]) -> str:
        return f"n{next(numbers)}{self.mark}"

    def marked(self, message: Message, numbers: Iterator[int]) -> Message:
        """Returns the message with marks in place of its content and reasoning."""
        marked = {name: value for name, value in message.items() if name not in REASONING}
        if text_of(message.get("content")).strip():
            marked["content"] = self._next(numbers)
        if reasoning_of(message):
            marked["reasoning_content"] = self._next(numbers)
        return marked

    def all_marked(self, message: Message, numbers: Iterator[int]) -> Message:
        """Returns the message with marks in place of names and arguments too."""
        marked = self.marked(message, numbers)
        marked |= {name: self._next(numbers) for name in SHOWN if message.get(name) and message["role"] not in RESULTS}
        if calls := message.get("tool_calls"):
            marked["tool_calls"] = [_renamed({"function": call, **call}, self._next(numbers)) for call in calls]
            for call in marked["tool_calls"]:
                if call["function"].get("arguments"):
                    call["function"]["arguments"] = {"m": self._next(numbers)}
        return marked


def reasoning_of(message: Message) -> str:
    """Returns the reasoning, under any of its names."""
    return str(next((value for name in REASONING if (value := message.get(name))), ""))


def _loss(message: Message, text: str) -> tuple[str, str] | None:
    """Returns which part of a marked message is missing in the text, and what to do about it."""
    role = message["role"]
    calls = list(message.get("tool_calls") or ())
    for call in calls:
        if _name_of(call) not in text:
            first_alone = _name_of(calls[0]) in text
            return "a call of ", "give each call a message of its own" if first_alone else WITHOUT_TOOLS
        arguments = call.get("function", call).get("arguments")
        if isinstance(arguments, Mapping) and not all(str(value) in text for value in arguments.values()):
            return "the arguments of a call of ", WITHOUT_TOOLS
    content = text_of(message.get("content")).strip()
    if content and content not in text and json.dumps(content, ensure_ascii=False)[1:-1] not in text:
        way = {"tool": WITHOUT_TOOLS, "function": "give it the role tool", "system": "put it into the first user message"}
        if role == "assistant":
            beside = "they stand beside calls: take them out, or put them into a message before the calls"
            return "the words of ", beside if calls else "take the message out"
        return "", way.get(role, "give it another role")
    return None


def _lost_with(message: Message, text: str, *, thoughts: bool) -> tuple[str, str] | None:
    """Returns which of its names and, with ``thoughts``, reasoning is missing."""
    if thoughts and (reasoning := reasoning_of(message).strip()) and reasoning not in text:
        return "the reasoning of ", "write it into the content, as the model writes it, or leave it unread (data.ignore)"
    for name in SHOWN:
        if message["role"] not in RESULTS and message.get(name) and str(message[name]) not in text:
            return f"the {name!r} of ", f"write it into the content, or leave it unread (data.ignore {name})"
    return None


def refuse_cuts(messages: Sequence[Message], text: str, *, answers: bool, first: int = 1) -> None:
    """Raises ``UserError`` for a message of which the template writes only some words: it may cut thoughts out of contents.

    Args:
        answers: checks the assistant's messages; else all others.
        first: the number of the first message.
    """
    for number, message in enumerate(messages, start=first):
        if (message["role"] == "assistant") != answers or text_of(message.get("content")).strip() in text:
            continue
        parts = (part.strip() for content in texts_of(message.get("content")) for part in _TAGS.split(content))
        if (lost := next((part for part in parts if not _is_written(part, text)), None)) is not None:
            raise UserError(
                f"the chat template leaves out or changes words of message {number} ({message['role']}), such as"
                f" {lost[:40]!r}: {'give prompt and completion as texts, or ' * answers}take them out"
            )


def _is_written(part: str, text: str) -> bool:
    forms = (part, *(json.dumps(part, ensure_ascii=ascii)[1:-1] for ascii in (False, True)))
    return any(form in text for form in forms) or " ".join(part.split()) in " ".join(text.split())


def _name_of(tool: Mapping[str, Any]) -> str:
    return str(tool.get("function", tool).get("name", ""))


def _renamed(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns a tool or a call with another name."""
    return {**tool, "function": {**tool["function"], "name": name}} if "function" in tool else {**tool, "name": name}


def _shape(message: Message) -> Any:
    """Returns everything in a message that affects what a template writes of it."""
    if _is_plain(message) and _NAMED.isdisjoint(message):
        return message["role"], bool(message["content"].strip())
    content, calls = message.get("content"), message.get("tool_calls")
    words: Any = bool(content.strip()) if isinstance(content, str) else bool(text_of(content).strip())
    if has_pictures(content):
        words = tuple(part["type"] for part in text_items(content))
    called = tuple(bool(call.get("function", call).get("arguments")) for call in calls) if calls else ()
    return message["role"], words, bool(reasoning_of(message)), called, *(bool(message.get(name)) for name in SHOWN)


def _is_plain(message: Message) -> bool:
    """Returns True if its content is a text, and nothing in it has several forms."""
    return type(message.get("content")) is str and _FORMED.isdisjoint(message)


def _in_form(message: Message, as_json: bool, in_parts: bool) -> Message:
    """Returns the message with its content, thoughts and arguments in the form that the template accepts."""
    calls, reasoning = message.get("tool_calls"), reasoning_of(message)
    shaped = {**message, "content": text_of(message.get("content"))}
    if in_parts or has_pictures(message.get("content")):
        shaped["content"] = text_items(message.get("content"))
    if reasoning:
        shaped |= dict.fromkeys(REASONING, reasoning)
    if message["role"] == "tool":
        shaped.setdefault("tool_call_id", NO_ID)
    if calls:
        shaped["tool_calls"] = [_call_in_form(call, as_json) for call in calls]
    return shaped


def _call_in_form(call: Mapping[str, Any], as_json: bool) -> dict[str, Any]:
    function = dict(call.get("function", call))
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {"arguments": arguments}
    if as_json:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"id": NO_ID, "type": "function", **call, "function": {**function, "arguments": arguments}}
