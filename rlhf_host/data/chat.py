"""Prompts as tokens: chat templates and own templates."""

from __future__ import annotations

import copy
import inspect
import json
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from functools import partial
from typing import Any

from rlhf_host.config.schema import DataConfig
from rlhf_host.errors import UserError
from rlhf_host.records.episodes import Message

TEMPLATE_S = 10.0
"""Longest time for one conversation."""


def for_chat(tokenizer: Any, data: DataConfig) -> Any:
    """The tokenizer, or a copy whose chat template knows ``data.template_kwargs`` and ``data.day``, whoever applies it.

    Raises ``UserError`` for what no chat template can be told.
    """
    if not data.template_kwargs and data.day is None:
        return tokenizer
    told: dict[str, Any] = {}
    taken = inspect.signature(tokenizer.apply_chat_template).parameters
    for text in data.template_kwargs:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"data.template_kwargs {text!r}: write KEY=VALUE, such as enable_thinking=false")
        if name in (*taken, "messages", "strftime_now"):
            raise UserError(f"data.template_kwargs {text!r}: {name} is given by the host")
        if not re.search(rf"\b{name}\b", str(getattr(tokenizer, "chat_template", None))):
            raise UserError(f"data.template_kwargs {text!r}: the tokenizer's chat template does not read {name}")
        try:
            told[name] = json.loads(value)
        except ValueError:
            told[name] = value
    if data.day is not None:
        try:
            told["strftime_now"] = date.fromisoformat(data.day).strftime
        except ValueError as error:
            raise UserError(f"data.day {data.day!r} is no day such as 2026-12-31") from error
    own = copy.copy(tokenizer)
    own.apply_chat_template = partial(tokenizer.apply_chat_template, **told)
    return own


def tells_the_day(tokenizer: Any) -> bool:
    """Whether its chat template writes what day it is."""
    return "strftime_now" in str(getattr(tokenizer, "chat_template", None))


def render_prompt(
    prompt: str | Sequence[Message], tokenizer: Any, system_prompt: str | None = None, template: str | None = None
) -> list[int]:
    """One prompt's token ids, ready for the model to go on from. See ``render_prompts``."""
    return render_prompts([prompt], tokenizer, system_prompt, template)[0]


def render_prompts(
    prompts: Sequence[str | Sequence[Message]], tokenizer: Any, system_prompt: str | None = None, template: str | None = None
) -> list[list[int]]:
    """Token ids of each prompt.

    ``template`` of ``None`` means the tokenizer's chat template where it has one, else plain text; ``none`` means plain text;
    anything else is a text in which ``{prompt}`` is replaced (other braces stay as they are). A system prompt becomes the
    first message, or the first paragraph of plain text; a prompt that brings its own system message keeps that one.

    A chat template writes the beginning-of-sequence token itself, so its text is tokenised without special tokens: otherwise
    there would be two of them. Plain text gets what the tokenizer adds, except an end-of-sequence token.

    Raises ``UserError`` for a template without ``{prompt}``, for a conversation where there is no chat template, and for what
    the chat template refuses.
    """
    check_template(template)
    texts = [prompt_text(prompt, tokenizer, system_prompt, template) for prompt in prompts]
    return encode_prompts(texts, tokenizer, chat=uses_chat_template(tokenizer, template))


def prompt_text(
    prompt: str | Sequence[Message],
    tokenizer: Any,
    system_prompt: str | None = None,
    template: str | None = None,
    tools: Sequence[Any] | None = None,
) -> str:
    """A prompt as the text that ``encode_prompts`` takes. ``tools`` go to the chat template, where there is one."""
    if uses_chat_template(tokenizer, template):
        return apply_template(tokenizer, conversation(prompt, system_prompt), add_generation_prompt=True, tools=tools)
    return _plain(prompt, system_prompt, template)


def encode_prompts(texts: Sequence[str], tokenizer: Any, *, chat: bool) -> list[list[int]]:
    """Token ids of rendered prompts; ``chat`` says that a chat template wrote them."""
    encoded = encode(texts, tokenizer, special=not chat)
    return encoded if chat else [trim(text, ids, tokenizer) for text, ids in zip(texts, encoded, strict=True)]


def trim(text: str, ids: list[int], tokenizer: Any) -> list[int]:
    """The tokens of a prompt without the end, and the second beginning, that the tokenizer added."""
    if ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
        ids = ids[:-1]
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        ids = ids[1:]  # the text itself began with it
    return ids


def uses_chat_template(tokenizer: Any, template: str | None) -> bool:
    """Whether prompts and turns go through the tokenizer's chat template."""
    return template is None and bool(getattr(tokenizer, "chat_template", None))


def rendering(tokenizer: Any, template: str | None) -> str:
    """What becomes of prompts, for people."""
    if uses_chat_template(tokenizer, template):
        return "prompts in the tokenizer's chat template"
    if template is None:
        return "prompts as plain text: the tokenizer has no chat template"
    return "prompts as plain text" if template == "none" else "prompts in data.template"


def check_template(template: str | None) -> None:
    """Raise ``UserError`` for an own template that has no place for the prompt."""
    if template is not None and template != "none" and "{prompt}" not in template:
        raise UserError(
            f"data.template {template!r} has no {{prompt}}: write it where the prompt goes, or 'none' for plain text"
        )


def conversation(prompt: str | Sequence[Message], system_prompt: str | None) -> list[Message]:
    """A text as a user's message; the system prompt first, unless the messages bring their own."""
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system_prompt and messages[0]["role"] != "system":
        return [{"role": "system", "content": system_prompt}, *messages]
    return messages


def _plain(prompt: str | Sequence[Message], system_prompt: str | None, template: str | None) -> str:
    if not isinstance(prompt, str):
        if sum(message["role"] != "system" for message in prompt) > 1:
            raise UserError(
                "a prompt is a conversation of several turns, which needs a chat template: "
                "leave data.template unset and use a tokenizer that has one"
            )
        if any(message["role"] == "system" for message in prompt):
            system_prompt = None
        prompt = "\n\n".join(message["content"] for message in prompt)
    text = prompt if template is None or template == "none" else template.replace("{prompt}", prompt)
    return f"{system_prompt}\n\n{text}" if system_prompt else text


def apply_template(
    tokenizer: Any, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Sequence[Any] | None = None
) -> str:
    """A conversation in the tokenizer's chat template. Raises ``UserError`` for what the template refuses."""
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
        raise UserError(f"the tokenizer's chat template refuses a conversation of roles {roles}: {reason}") from error


@contextmanager
def _deadline() -> Iterator[None]:
    """A template may loop for ever. Only the main thread, where prompts are read, can be woken."""
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


def encode(texts: Sequence[str], tokenizer: Any, *, special: bool) -> list[list[int]]:
    """Token ids of each text; ``special``: with the tokens that the tokenizer adds by itself."""
    if not texts:
        return []
    try:
        encoded = tokenizer(list(texts), add_special_tokens=special, return_attention_mask=False)
    except TypeError as error:  # what fast tokenizers say of half a character
        raise UserError("the tokenizer cannot read a text: does it have half a character (a lone surrogate)?") from error
    return [list(ids) for ids in encoded["input_ids"]]
