"""A model's answer as content, reasoning and calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_host.data import contents, tool_formats
from rlhf_host.data.template_writer import Tools
from rlhf_host.errors import UserError
from rlhf_host.records.episodes import FinishReason
from rlhf_host.records.messages import Reply, ToolCall


class AnswerReader:
    """Reads answers with the tokenizer's own ``response_template``, if it has one, or that of a format of calls.

    Args:
        tool_format: how the model writes tool calls: ``auto``, ``none``, or a name of ``tool_formats.FORMATS``.
        chat: False: answers are plain text.

    Raises ``UserError`` for an unknown ``tool_format``.
    """

    def __init__(self, tokenizer: Any, tool_format: str, chat: bool):
        known = ("auto", "none", *tool_formats.FORMATS)
        if tool_format not in known:
            raise UserError(f"rollout.tool_format {tool_format!r} is not one of {', '.join(known)}")
        self.tokenizer, self.chat, self.tool_format = tokenizer, chat, tool_format
        self._own = getattr(tokenizer, "response_template", None) if tool_format == "auto" else None
        if tool_format == "auto":
            self.tool_format = tool_formats.detect(_template_text(tokenizer)) if chat else "none"

    @property
    def reads_calls(self) -> bool:
        """True if ``read`` can find calls."""
        return bool(self._own) or self.tool_format != "none"

    def read(
        self, ids: Sequence[int], opening: str, tools: Tools | None, finish_reason: FinishReason, stop: Sequence[str] = ()
    ) -> Reply:
        """Returns an answer as a message, which ends before the first of the texts ``stop``.

        Args:
            ids: its tokens, without those that end it.
            opening: text that the chat template writes before it.
        """
        plain, text = (before_stop(self.tokenizer.decode(ids, skip_special_tokens=skips), stop) for skips in (True, False))
        reads = tools and self.reads_calls
        thinks = "</think>" in text or "<think>" in text or "<think>" in opening or self.tool_format == "gptoss"
        if not self.chat or not (reads or thinks or self._own):
            return Reply(plain, finish_reason=finish_reason)
        if self._own:
            chosen = self._own if tools else tool_formats.without_calls(self._own)
        else:
            chosen = tool_formats.response_template(self.tool_format, opening, tools=bool(tools))
        try:
            told = self.tokenizer.parse_response(text, chosen, prefix=opening, tools=list(tools or ()))
            calls = tuple(_call(call) for call in _as_list(told.get("tool_calls")))
            if calls and not self._own:
                tool_formats.check_ended(self.tool_format, text)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            problem = " ".join(str(error).split())[:200]
            return Reply(plain, finish_reason=finish_reason, problems=(f"unreadable: {problem}",))
        reasoning = told.get("reasoning_content") or told.get("thinking") or told.get("reasoning")
        content = self._without_specials(contents.text_of(told.get("content"))).strip()
        if plain.strip() and not (content or reasoning or calls):
            return Reply(plain, finish_reason=finish_reason, problems=("unreadable: none of the answer's parts is found",))
        return Reply(content, reasoning and self._without_specials(str(reasoning)).strip(), calls, finish_reason)

    def _without_specials(self, text: str) -> str:
        for token in self.tokenizer.all_special_tokens:
            text = text.replace(token, "")
        return text


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Returns the text before the first stop text in it."""
    return text[: min((place for one in stop if (place := text.find(one)) >= 0), default=None)]


def _template_text(tokenizer: Any) -> str:
    template = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else str(template)


def _as_list(calls: Any) -> list[Any]:
    if calls is None:
        return []
    flat = calls if isinstance(calls, list) else [calls]
    return [one for call in flat for one in (call if isinstance(call, list) else [call])]


def _call(call: Mapping[str, Any]) -> ToolCall:
    """Returns the call. Raises ``ValueError`` for a call without a name, with arguments that are not an object, or that other
    programs cannot read.
    """
    function = call.get("function", call)
    name, arguments = function.get("name"), function.get("arguments")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not name.strip():
        raise ValueError("a call without a name")
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {name} are no object")
    json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode()  # NaN, half characters
    return ToolCall(name.strip(), arguments)
