"""``rlhf doctor --chat MODEL``: what the model's chat template can express, found by trying."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlhf_authoring.doctor.findings import Finding
from rlhf_host import EpisodeFailed, Message, UserError
from rlhf_host.models import load_tokenizer, stop_tokens, tells_the_day
from rlhf_host.rollouts import ChatCodec
from rlhf_host.runs import named_run, run_model, run_of
from rlhf_host.settings import RoleConfig

SECTION = "Chat template"
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "description": "x"}}}
_TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds", "parameters": _PARAMETERS}}]
_USER: Message = {"role": "user", "content": "a question"}
_ANSWER: Message = {"role": "assistant", "content": "an answer"}


def chat(model: str) -> Iterator[Finding]:
    """Raises ``UserError`` for a model that has no tokenizer. A run stands for its model."""
    path = named_run(Path(model))
    role = RoleConfig(model=str(run_model(path).path) if path.is_dir() and run_of(path) else model)
    tokenizer = load_tokenizer(role)
    codec = ChatCodec(tokenizer, stop_ids=stop_tokens(role))
    if not codec.chat:
        advice = (
            "conversations of several turns work as plain text; tools need a model with a chat template, or tool_format text"
        )
        yield Finding(SECTION, "template", "note", "none: prompts are plain text", advice)
        return
    ends = " ".join(repr(tokenizer.decode([token])) for token in sorted(codec.stop_ids))
    yield Finding(SECTION, "an answer ends at", "ok", ends)
    yield _tried("several turns", codec.check)
    yield _tried("system messages", lambda: codec.render([{"role": "system", "content": "be brief"}, _USER]))
    yield _tried("tools", lambda: codec.check(_TOOLS))
    yield _tried("parallel calls", lambda: codec.delta(_calls(2), _results(2), [], tools=_TOOLS))
    own = " (the tokenizer's own response template)" if getattr(tokenizer, "response_template", None) else ""
    form = codec.tool_format if not own else "read"
    yield Finding(SECTION, "calls are written as", "ok" if own or form != "none" else "absent", f"{form}{own}")
    for name, answer in (("earlier answers", _ANSWER), ("earlier reasoning", {**_ANSWER, "reasoning_content": "thoughts"})):
        yield _kept(name, codec, answer)
    if tells_the_day(tokenizer):
        yield Finding(SECTION, "date", "note", "the template writes today's date into prompts: runs of another day have others")


def _calls(count: int) -> Message:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    return {"role": "assistant", "content": "", "tool_calls": [{**call, "id": f"call0000{number}"} for number in range(count)]}


def _results(count: int) -> list[Message]:
    return [
        {"role": "tool", "name": "add", "tool_call_id": f"call0000{number}", "content": f"result {number}"}
        for number in range(count)
    ]


def _tried(name: str, attempt: Callable[[], Any]) -> Finding:
    try:
        attempt()
    except (EpisodeFailed, UserError) as error:
        why, _, way = str(error).removeprefix("codec: ").partition(": ")
        return Finding(SECTION, name, "absent", why, way)
    return Finding(SECTION, name, "ok")


def _kept(name: str, codec: ChatCodec, answer: Message) -> Finding:
    try:
        changed = codec.rewrites([_USER, answer], [_USER])
    except EpisodeFailed as error:
        return Finding(SECTION, name, "absent", str(error))
    if not changed:
        return Finding(SECTION, name, "ok", "stay as they were said")
    advice = "they stay as they were sampled; rollout.history template gives such turns a row as the template writes them"
    return Finding(SECTION, name, "note", "the template writes them otherwise once others follow", advice)
