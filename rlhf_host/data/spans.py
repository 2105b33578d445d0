"""Examples as rendered texts, with the places that are trained: what the model itself will write, and nothing else."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlhf_host.data.chat import apply_template, check_template, conversation, prompt_text, uses_chat_template
from rlhf_host.data.examples import Example
from rlhf_host.data.row_reader import Malformed
from rlhf_host.data.row_values import UNTRAINED, Text
from rlhf_host.errors import UserError
from rlhf_host.records.episodes import Message


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A prompt and what follows it, as text."""

    prompt: str
    rest: str
    trained: tuple[tuple[int, int], ...]
    """Begin and end, in ``rest``, of each trained span."""
    chat: bool
    """The chat template wrote it, special tokens included."""
    end: int | None = None
    """A token to put after ``rest``, trained, unless that ends with it."""
    columns: Mapping[str, float] = field(default_factory=dict)
    steps: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class _Turn:
    """One answer of a conversation: the prompt that the model will see, and what it is to write."""

    prompt: str
    answer: str
    stopped: bool
    """The answer's text ends with a stop token."""


class Marker:
    """Renders examples and says what is trained.

    An answer begins where the conversation with it leaves the conversation before it, rendered for generation. It ends with the
    first stop token after its words. Both are looked up in every row. Nothing is read from the template's source or from
    token ids, so a template need not have generation blocks, and a padding token that is also the stop token does no harm.

    Where a template changes earlier turns (some leave out their reasoning), such a turn becomes a row of its own.

    Args:
        history: ``refuse`` makes that an error of the row.
        stop_ids: further stop tokens of the model.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        system_prompt: str | None = None,
        template: str | None = None,
        history: Literal["rows", "refuse"] = "rows",
        stop_ids: Sequence[int] = (),
    ):
        check_template(template)
        self._tokenizer, self._system_prompt, self._template, self._history = tokenizer, system_prompt, template, history
        self.chat = uses_chat_template(tokenizer, template)
        known = getattr(tokenizer, "added_tokens_decoder", {})
        self._special = {*tokenizer.all_special_tokens, *(str(token) for token in known.values() if token.special)} - {""}
        self.stops = {*tokenizer.convert_ids_to_tokens(list(stop_ids)), tokenizer.eos_token} - {None}
        self._tail = ""
        self._eos: int | None = tokenizer.eos_token_id
        self.end = self._eos
        """The token that ends an answer."""
        if self.chat:
            self._learn_ending()

    def _learn_ending(self) -> None:
        """What the template writes after an answer that another message follows, and after the last one."""
        mark = secrets.token_hex(8)
        turn: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": mark}]
        try:
            last = apply_template(self._tokenizer, turn, add_generation_prompt=False).rpartition(mark)[2]
            middle = apply_template(self._tokenizer, [*turn, turn[0]], add_generation_prompt=False).partition(mark)[2]
        except UserError:  # it wants other roles: then each row shows how it ends
            return
        self._tail = last
        both = last[: _common(last, middle)]
        choices = ((both, self.stops), (both, self._special), (last, self.stops), (last, self._special))
        stop = next((found[0] for text, known in choices if (found := _first(text, known))), None)
        if stop is not None:
            self.stops = (self.stops - {self._tokenizer.eos_token}) | {stop}
            self.end = self._tokenizer.convert_tokens_to_ids(stop)

    def mark(self, example: Example) -> list[tuple[MarkedText, ...]]:
        """The units that an example makes: one, or several of one text where the template changes earlier turns.

        Raises ``Malformed`` for an example that cannot be rendered, or has nothing to train.
        """
        try:
            if example.steps:
                return [(self._plain(example, "".join(text for text, _ in example.steps), {}),)]
            units = [self._rows(example, *each) for each in zip(example.completions, example.columns, strict=True)]
        except UserError as error:
            raise Malformed(str(error)) from None
        if len(units) == 1:
            return [(text,) for text in units[0]]
        prompts = {text.prompt for texts in units for text in texts}
        if any(len(texts) > 1 for texts in units) or len(prompts) > 1:
            raise Malformed(
                "the chat template changes earlier turns, so the answers of this pair are no two rows of one prompt"
            )
        return [tuple(texts[0] for texts in units)]

    def _rows(self, example: Example, completion: Text, columns: Mapping[str, float]) -> list[MarkedText]:
        if isinstance(example.prompt, str) and isinstance(completion, str):
            return [self._plain(example, completion, columns)]
        before = conversation(example.prompt, None) if example.prompt else []
        after: list[Message] = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        messages = [*before, *after]
        trained = [
            number
            for number, message in enumerate(messages)
            if number >= max(len(before), 1) and message["role"] == "assistant" and UNTRAINED not in message
        ]
        if not trained:
            raise Malformed("no message of the assistant is trained")
        plain = [{key: value for key, value in message.items() if key != UNTRAINED} for message in messages]
        if not self.chat:
            if len(trained) > 1 or trained[0] != len(plain) - 1:
                raise Malformed(
                    "a conversation of several turns needs a chat template: leave data.template unset and use a tokenizer"
                    " that has one"
                )
            only = Example(plain[:-1], (plain[-1]["content"],))
            return [self._plain(only, plain[-1]["content"], columns)]
        messages = conversation(plain, self._system_prompt)
        shift = len(messages) - len(plain)
        return self._conversation(messages, [number + shift for number in trained], example.tools, columns)

    def _plain(self, example: Example, completion: str, columns: Mapping[str, float]) -> MarkedText:
        """A completion put behind its prompt as it is."""
        whole = ((0, len(completion)),)
        if not example.prompt:
            return MarkedText("", completion, whole, False, self._eos, columns)
        template = "none" if example.own_turns and self._template is None else self._template
        chat = uses_chat_template(self._tokenizer, template)
        prompt = prompt_text(example.prompt, self._tokenizer, self._system_prompt, template, example.tools)
        end = self.end if chat else self._eos
        return MarkedText(prompt, completion, whole, chat, end, columns, example.steps)

    def _conversation(
        self, messages: list[Message], trained: Sequence[int], tools: Sequence[Any] | None, columns: Mapping[str, float]
    ) -> list[MarkedText]:
        turns = [self._turn(messages[: number + 1], tools) for number in trained]
        whole = turns[-1].prompt + turns[-1].answer
        _refuse_left_out(messages[: trained[-1] + 1], tools, whole)
        together = [turn for turn in turns if whole.startswith(turn.prompt + turn.answer)]
        alone = [turn for turn in turns if turn not in together]
        if alone and self._history == "refuse":
            raise Malformed(
                f"the chat template changes {len(alone)} of {len(turns)} trained turns once others follow: data.history rows"
                " makes a row of each"
            )
        rows = [self._marked([turn], turn.prompt + turn.answer, columns) for turn in alone]
        return [*rows, self._marked(together, whole, columns)]

    def _marked(self, turns: Sequence[_Turn], text: str, columns: Mapping[str, float]) -> MarkedText:
        begin = len(turns[0].prompt)
        spans = tuple((len(turn.prompt) - begin, len(turn.prompt + turn.answer) - begin) for turn in turns)
        end = None if turns[-1].stopped else self.end
        return MarkedText(text[:begin], text[begin:], spans, True, end, columns)

    def _turn(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> _Turn:
        """The last message as what the model is to write."""
        prompt = apply_template(self._tokenizer, messages[:-1], add_generation_prompt=True, tools=tools)
        text = apply_template(self._tokenizer, messages, add_generation_prompt=False, tools=tools)
        begin = _common(prompt, text)
        if missing := prompt[begin:].strip():
            raise Malformed(
                f"the chat template prompts with {missing[-40:]!r}, and does not write this before the answer of a conversation:"
                " give prompt and completion as texts"
            )
        end, stopped = self._end(text, begin, messages, tools)
        if end <= begin:
            raise Malformed(f"the chat template leaves out message {len(messages)} (assistant)")
        for name in _called(messages[-1]):
            if name not in text[begin:end]:
                raise Malformed(f"the chat template leaves out the call of {name!r} in message {len(messages)} (assistant)")
        return _Turn(prompt, text[begin:end], stopped)

    def _end(self, text: str, begin: int, messages: Sequence[Message], tools: Sequence[Any] | None) -> tuple[int, bool]:
        """Where the answer ends, and whether with a stop token."""
        words = self._words_end(text, begin, messages, tools)
        for known in (self.stops, self._special):
            if found := _first(text[words:], known):
                return words + found.end(), True
        return (len(text) if messages[-1].get("tool_calls") or words <= begin else words), False

    def _words_end(self, text: str, begin: int, messages: Sequence[Message], tools: Sequence[Any] | None) -> int:
        """Where the content of the last message ends."""
        content = str(messages[-1].get("content") or "")
        for words in (content, content.strip()):
            if words and not messages[-1].get("tool_calls") and text.endswith(words + self._tail):
                return len(text) - len(self._tail)
        mark = secrets.token_hex(8)
        marked = [*messages[:-1], {**messages[-1], "content": mark}]
        try:
            _, seen, tail = apply_template(self._tokenizer, marked, add_generation_prompt=False, tools=tools).rpartition(mark)
        except UserError:
            seen, tail = "", ""
        if seen and text.endswith(tail) and len(text) - len(tail) >= begin:
            return len(text) - len(tail)
        if _first(content, self.stops | self._special):
            raise Malformed(f"cannot tell where the chat template ends message {len(messages)}, which has special tokens")
        return begin


def _called(message: Message) -> list[str]:
    """The names of the functions that a message calls."""
    return [str(call.get("function", call)["name"]) for call in message.get("tool_calls") or ()]


def _refuse_left_out(messages: Sequence[Message], tools: Sequence[Any] | None, text: str) -> None:
    """Raises ``Malformed`` where tools, calls or their results are not in the text: a template need not know them."""
    for tool in tools or ():
        known = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        if str(known.get("name", "")) not in text:
            raise Malformed(f"the chat template leaves out the tool {known['name']!r}: it has no place for 'tools'")
    for number, message in enumerate(messages, start=1):
        for name in _called(message):
            if name not in text:
                raise Malformed(f"the chat template leaves out the call of {name!r} in message {number} (assistant)")
        content = str(message.get("content") or "").strip()
        if message["role"] == "tool" and content not in text and json.dumps(content)[1:-1] not in text:
            raise Malformed(f"the chat template leaves out message {number} (tool)")


def _common(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    if other.startswith(one):
        return len(one)
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _first(text: str, known: set[Any]) -> re.Match[str] | None:
    """The first place where one of the tokens is written."""
    if not known:
        return None
    return re.search("|".join(re.escape(token) for token in sorted(known, key=lambda token: (-len(token), token))), text)
