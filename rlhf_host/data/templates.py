"""Chat templates: the choice of template, its values beside the messages, and its text of a conversation."""

from __future__ import annotations

import copy
import inspect
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from functools import partial
from typing import Any

from rlhf_host.config.pairs import read_pairs
from rlhf_host.config.schema import DataConfig
from rlhf_host.data.contents import has_pictures
from rlhf_host.errors import UserError
from rlhf_host.records.episodes import Message

TEMPLATE_S = 10.0
"""Maximum seconds for one conversation."""


def for_chat(tokenizer: Any, data: DataConfig) -> Any:
    """Returns the tokenizer, or a copy whose chat template gets ``data.template_kwargs`` and ``data.day``, whoever applies it.

    Raises ``UserError`` for values that no chat template can get.
    """
    values = read_pairs(data.template_kwargs, "data.template_kwargs", "enable_thinking=false")
    for name in values:
        if problem := _untold(tokenizer, name):
            raise UserError(f"data.template_kwargs {name}: {problem}")
    if data.day is not None:
        try:
            values["strftime_now"] = date.fromisoformat(data.day).strftime
        except ValueError as error:
            raise UserError(f"data.day {data.day!r} is not a day such as 2026-12-31") from error
    return _knowing(tokenizer, values)


def for_row(tokenizer: Any, values: Mapping[str, Any]) -> Any:
    """Returns the tokenizer, or a copy whose chat template gets the row's values. An empty value that the template does not
    read is ignored.

    Raises ``UserError`` for any other value that it does not read.
    """
    told = {}
    for name, value in values.items():
        problem = _untold(tokenizer, name)
        if problem and value not in (None, "", [], {}):
            raise UserError(f"{name!r}: {problem} (data.ignore {name} leaves it unread)")
        if not problem:
            told[name] = value
    return _knowing(tokenizer, told)


def _untold(tokenizer: Any, name: str) -> str:
    """Returns why the chat template cannot get a value of this name; empty: it can."""
    if name in (*inspect.signature(tokenizer.apply_chat_template).parameters, "messages", "strftime_now"):
        return f"{name} is given by the host"
    if not re.search(rf"\b{re.escape(name)}\b", str(getattr(tokenizer, "chat_template", None))):
        return f"the tokenizer's chat template does not read {name}"
    return ""


def _knowing(tokenizer: Any, values: Mapping[str, Any]) -> Any:
    if not values:
        return tokenizer
    own = copy.copy(tokenizer)
    own.apply_chat_template = partial(tokenizer.apply_chat_template, **values)
    return own


def tells_the_day(tokenizer: Any) -> bool:
    """Returns True if its chat template writes the current day."""
    return "strftime_now" in str(getattr(tokenizer, "chat_template", None))


def uses_chat_template(tokenizer: Any, template: str | None) -> bool:
    """Returns True if prompts and turns go through the tokenizer's chat template."""
    return template is None and bool(getattr(tokenizer, "chat_template", None))


def rendering(tokenizer: Any, template: str | None) -> str:
    """Returns how prompts are rendered, for people."""
    if uses_chat_template(tokenizer, template):
        return "prompts in the tokenizer's chat template"
    if template is None:
        return "prompts as plain text: the tokenizer has no chat template"
    return "prompts as plain text" if template == "none" else "prompts in data.template"


def check_template(template: str | None) -> None:
    """Raises ``UserError`` for a user's template that has no place for the prompt."""
    if template is not None and template != "none" and "{prompt}" not in template:
        raise UserError(
            f"data.template {template!r} has no {{prompt}}: write it where the prompt goes, or 'none' for plain text"
        )


def apply_template(
    tokenizer: Any, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Sequence[Any] | None = None
) -> str:
    """Returns a conversation in the tokenizer's chat template. Raises ``UserError`` for messages that the template refuses."""
    options = {"tools": list(tools)} if tools else {}
    try:
        with _deadline():
            return str(
                tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **options
                )
            )
    except Exception as error:  # a template is a program of its author's: it raises what it likes
        roles = ", ".join(message["role"] for message in messages)
        reason = " ".join(str(error).split())
        if any(message["role"] == "system" for message in messages) and re.search("system|alternate|supported", reason.lower()):
            reason += " (where it has no system messages, put them into the first user message)"
        if any(has_pictures(message.get("content")) for message in messages):
            reason = "it has no place for pictures: take a model that sees, or leave them out of the rows"
        raise UserError(f"the tokenizer's chat template refuses a conversation of roles {roles}: {reason}") from error


@contextmanager
def _deadline() -> Iterator[None]:
    """Limits the time of a template, which may loop for ever. Works only in the main thread, where prompts are read."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def late(*_: Any) -> None:
        raise TimeoutError(f"it takes longer than {TEMPLATE_S:g} s")

    handler, timer = signal.signal(signal.SIGALRM, late), signal.setitimer(signal.ITIMER_REAL, TEMPLATE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)
