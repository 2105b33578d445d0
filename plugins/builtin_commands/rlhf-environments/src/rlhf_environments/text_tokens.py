"""Conversations as tokens without a model: a token for each byte of what is said, and others for all that is around it.

The host plays episodes with tokens. Here a conversation becomes tokens, and the same conversation again, whatever its texts are.
What is said is made of the tokens 0 to 255, one for each byte of UTF-8, so rewards read the texts as they are. Roles, calls of
tools and ends of messages are made of other tokens, which no text can contain and which decoding leaves out.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf_host import EpisodeFailed, Message, Reply, ToolCall

AROUND = 256
"""First token of what is around: the byte ``b`` is ``AROUND + b``."""
SAID, END = 512, 513
"""Tokens after which a message's text begins, and at its end."""
VOCABULARY = 514

Tools = Sequence[Mapping[str, Any]]

_TEMPLATE = """\
{%- if tools %}<|tools|>{{ tools | tojson }}<|end|>{% endif %}
{%- for message in messages %}<|{{ message['role'] }}|>
{%- if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}
{{- message['content'] }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
"""Chat template, of which the host reads that there is one and that it has tools. Episodes are not rendered with it."""


@functools.cache
def text_tokenizer() -> Any:
    """Returns the tokenizer of these tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # those of ByteLevel that stand for themselves
    others = iter(range(256, 512))
    names = {chr(byte) if byte in letters else chr(next(others)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=names, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    around = [f"<|around-{byte}|>" for byte in range(256)]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in (*around, "<|said|>", "<|end|>")])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", clean_up_tokenization_spaces=False)
    made.chat_template = _TEMPLATE
    return made


class TextCodec:
    """Messages to tokens and back, as the host's conversations ask for it. A system prompt is for those without one."""

    def __init__(self, system_prompt: str | None = None):
        self.tokenizer, self.system_prompt = text_tokenizer(), system_prompt
        self.chat, self.reads_calls, self.tool_format = True, True, "text"
        self.stop_ids = frozenset({END})

    def render(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        if self.system_prompt and not any(message.get("role") == "system" for message in messages):
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        head = message_tokens({"tools": [*tools]}) if tools else []
        return head + [token for message in messages for token in message_tokens(message)]

    def delta(self, last: Message, new: Sequence[Message], sampled: Sequence[int], *, tools: Tools | None = None) -> list[int]:
        return [token for message in new for token in message_tokens(message)]

    def rewrites(self, messages: Sequence[Message], new: Sequence[Message], tools: Tools | None = None) -> bool:
        return False

    def check(self, tools: Tools | None = None) -> None:
        """Has nothing to refuse: any conversation can be written."""

    def parse(
        self,
        sampled: Sequence[int],
        *,
        tools: Tools | None = None,
        finish_reason: Any = "stop",
        stop: Sequence[str] = (),
    ) -> Reply:
        [message] = messages_of(sampled)
        text = str(message["content"])
        cut = min((place for each in stop if (place := text.find(each)) >= 0), default=len(text))
        calls, problems = calls_of(message.get("tool_calls") or ()) if tools else ((), ())
        return Reply(text[:cut], message.get("reasoning"), calls, finish_reason, problems)


def calls_of(told: Sequence[Mapping[str, Any]]) -> tuple[tuple[ToolCall, ...], tuple[str, ...]]:
    """Returns calls in the form of OpenAI's chat completions as calls, and what cannot be read of them."""
    calls, problems = [], []
    for call in told:
        function = call.get("function", call)
        name, arguments = function.get("name"), function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                problems.append(f"the arguments of {name} are no JSON: {error}")
                continue
        if not isinstance(name, str) or not isinstance(arguments, Mapping):
            problems.append(
                f"{json.dumps(call, ensure_ascii=False, default=str)[:200]} has no name, or arguments that are no object"
            )
            continue
        calls.append(ToolCall(name, dict(arguments), str(call.get("id") or "")))
    return tuple(calls), tuple(problems)


def message_tokens(message: Mapping[str, Any]) -> list[int]:
    """Returns a message, or the tools of a conversation, as tokens. Raises ``EpisodeFailed`` for one that no text can hold."""
    around, content = dict(message), message.get("content")
    said = content if isinstance(content, str) else ""
    if isinstance(content, str):
        del around["content"]
    elif content:
        if odd := [part for part in content if not isinstance(part, Mapping) or part.get("type") != "text"]:
            raise EpisodeFailed(f"a message has a part that is no text: {str(odd[0])[:80]}")
        said = "".join(str(part.get("text", "")) for part in content)
    try:
        ahead = json.dumps(around, ensure_ascii=False).encode()
        return [*(AROUND + byte for byte in ahead), SAID, *said.encode(), END]
    except (TypeError, ValueError) as error:  # a lone surrogate, or an object that is no JSON
        raise EpisodeFailed(f"a message cannot be written as text: {error}") from error


def messages_of(token_ids: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the messages that tokens are made of."""
    return list(_messages(token_ids))


def _messages(token_ids: Sequence[int]) -> Iterator[dict[str, Any]]:
    around, said, in_text = bytearray(), bytearray(), False
    for token in token_ids:
        if token == END:
            message = json.loads(around)
            yield {**message, "content": message.get("content", said.decode())}
            around, said, in_text = bytearray(), bytearray(), False
        elif token == SAID:
            in_text = True
        elif in_text:
            said.append(token)
        else:
            around.append(token - AROUND)
