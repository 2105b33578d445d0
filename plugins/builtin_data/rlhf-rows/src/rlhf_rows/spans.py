"""Examples as rendered texts, with their trained places: exactly what the model itself will write."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rlhf_host import Message, Picture, UserError
from rlhf_host.internals import UNTRAINED, Malformed, pictures_in, with_system
from rlhf_host.rendering import (
    Prompts,
    TemplateWriter,
    Tools,
    conversation,
    in_common,
    reasoning_of,
    refuse_cuts,
    special_tokens,
    text_of,
    uses_chat_template,
)
from rlhf_rows.endings import without_end
from rlhf_rows.examples import Example
from rlhf_rows.thoughts import (
    ClosedThoughtError,
    empty_thought,
    last_tag,
    thought_at_end,
    thought_at_start,
    way_to_think,
    without_opening,
)
from rlhf_rows.values import Text


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A prompt and the text that follows it."""

    prompt: str
    rest: str
    trained: tuple[tuple[int, int], ...]
    """Begin and end, in ``rest``, of each trained span."""
    chat: bool
    """True if the chat template wrote it, special tokens included."""
    end: int | None = None
    """A token to add after ``rest``, trained, unless the text ends with it."""
    columns: Mapping[str, float] = field(default_factory=dict)
    steps: tuple[tuple[str, float], ...] = ()
    images: tuple[Picture, ...] = ()
    """Pictures of both, in the order of their places."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """One answer of a conversation: the prompt that the model will see, and the text that it should write."""

    prompt: str
    answer: str
    stopped: bool
    """True if the answer's text ends with a stop token."""
    images: tuple[Picture, ...] = ()


class Marker:
    """Renders examples and marks what is trained.

    An answer begins where the rendered conversation with it differs from the conversation before it, rendered for generation.
    It ends with the first stop token after its words. Both places are found in every row. Nothing is read from the template's
    source or from token ids. So a template needs no generation blocks, and a padding token that is also the stop token does no
    harm.

    If a template changes earlier turns (some leave out their reasoning), such a turn becomes a separate row.

    Args:
        history: with ``refuse``, that is an error of the row.
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
        self._tokenizer, self._system_prompt, self._history = tokenizer, system_prompt, history
        self._prompts = Prompts(tokenizer, system_prompt, template)
        self.chat, self._writer, self._rendered = self._prompts.chat, self._prompts.writer, self._prompts.rendered
        self._special = special_tokens(tokenizer)
        self.stops = {*tokenizer.convert_ids_to_tokens(list(stop_ids)), tokenizer.eos_token} - {None}
        self._ends = tuple(self.stops)
        """Texts that already end a turn, so that no end is added."""
        self._tail = ""
        self._next: dict[bool, str] = {}
        """False: what ends an answer where only the next role's marker does; True: the same after calls."""
        self._eos: int | None = tokenizer.eos_token_id
        self.end = self._eos
        """Token that ends an answer."""
        if uses_chat_template(tokenizer, None):
            self._learn_ending()

    def _learn_ending(self) -> None:
        """Learns what the template writes after an answer that another message follows, and after the last one."""
        mark = secrets.token_hex(8)
        turn: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": mark}]
        try:
            last = self._writer.write(turn, opens=False).rpartition(mark)[2]
            middle = self._writer.write([*turn, turn[0]], opens=False).partition(mark)[2]
        except UserError:  # it wants other roles: then each row shows how it ends
            return
        both = last[: in_common(last, middle)]
        choices = ((both, self.stops), (both, self._special), (last, self.stops), (last, self._special))
        stop = next((found[0] for text, known in choices if (found := _first(text, known))), None)
        if stop is None and (opens := _opening_stop(middle, self.stops)):
            self._next[False], stop = opens
        if stop is not None:
            self._ends = tuple(dict.fromkeys((*self._ends, stop)))
        if not self.chat:
            return
        self._tail = last
        if self._next:
            self.end = self._tokenizer.convert_tokens_to_ids(stop)
            self._next[True] = self._learn_call_ending()
            return
        if stop is not None:
            self.stops = (self.stops - {self._tokenizer.eos_token}) | {stop}
            self.end = self._tokenizer.convert_tokens_to_ids(stop)

    def _learn_call_ending(self) -> str:
        """Learns what opens the result of a call; an answer's ending if nothing does."""
        mark = secrets.token_hex(8)
        call = {"type": "function", "function": {"name": "f", "arguments": {"m": mark}}}
        turn: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            alone = self._writer.write(turn, opens=False)
            more = self._writer.write([*turn, {"role": "tool", "name": "f", "content": "y"}], opens=False)
        except UserError:
            return self._next[False]
        opens = _opening_stop(more[len(alone) :], self.stops) if more.startswith(alone) else None
        return opens[0] if opens else self._next[False]

    def mark(self, example: Example) -> list[tuple[MarkedText, ...]]:
        """Returns the units of an example: one, or several of one text if the template changes earlier turns.

        Raises ``Malformed`` for an example that cannot be rendered, or has nothing to train.
        """
        try:
            if example.steps:
                return [(self._plain(example, "".join(text for text, _ in example.steps), {}),)]
            units = [self._rows(example, *each) for each in zip(example.completions, example.columns, strict=True)]
        except ClosedThoughtError as error:
            raise Malformed(f"{error}{self._way_to_think(example)}") from None
        except UserError as error:
            raise Malformed(str(error)) from None
        if len(units) == 1:
            return [(text,) for text in units[0]]
        prompts = {text.prompt for texts in units for text in texts}
        if any(len(texts) > 1 for texts in units) or len(prompts) > 1:
            raise Malformed(
                "the chat template changes earlier turns, so the answers of this pair are not two rows with the same prompt"
            )
        return [tuple(texts[0] for texts in units)]

    def _way_to_think(self, example: Example) -> str:
        own = example.beside
        messages = conversation(example.prompt or "x", None)
        return way_to_think(
            lambda values: self._writer.told({**own.template_kwargs, **values}).write(messages, opens=True, tools=own.tools)
        )

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
        if not self.chat:
            return [self._plain(_as_text(messages, trained, example), messages[-1]["content"], columns)]
        plain = [self._clean(message, number) for number, message in enumerate(messages, start=1)]
        whole = conversation(with_system(plain, example.beside.system), self._system_prompt)
        shift = len(whole) - len(plain)
        return self._conversation(whole, [number + shift for number in trained], example, columns)

    def _clean(self, message: Message, number: int) -> Message:
        """Returns the message for the template: without the mark, and without an end that the template writes itself."""
        self._rendered.refuse(text_of(message["content"]), f"message {number} ({message['role']})")
        if not isinstance(message["content"], str):
            return message
        content, end = without_end(message["content"], self._ends)
        if not end and UNTRAINED not in message:
            return message
        return {**{key: value for key, value in message.items() if key != UNTRAINED}, "content": content}

    def _plain(self, example: Example, completion: str, columns: Mapping[str, float]) -> MarkedText:
        """Returns a completion after its prompt, unchanged but with exactly one end."""
        content, end = ("", "") if example.steps else without_end(completion, self._ends)
        completion = content + end if end else completion
        if not example.prompt:
            return MarkedText("", completion, ((0, len(completion)),), False, None if end else self._eos, columns)
        chat, beside = self.chat and not example.own_turns, example.beside
        if chat:
            self._rendered.refuse(completion, "the answer")
        prompt = with_system(example.prompt, beside.system) if isinstance(example.prompt, list) else example.prompt
        text = self._prompts.text(prompt, beside, as_it_is=example.own_turns)
        steps = example.steps
        asked = prompt if isinstance(prompt, str) else text_of(prompt[-1].get("content"))
        chat_opens = chat and not text.rstrip().endswith(asked.rstrip())
        if chat_opens and steps:
            steps = ((without_opening(text, steps[0][0]), steps[0][1]), *steps[1:])
            completion = "".join(step for step, _ in steps)
        elif chat_opens:
            completion = without_opening(text, completion)
        whole = ((0, len(completion)),)
        last = None if end else self.end if chat else self._eos
        return MarkedText(text, completion, whole, chat, last, columns, steps, pictures_in(prompt))

    def _conversation(
        self, messages: list[Message], trained: Sequence[int], example: Example, columns: Mapping[str, float]
    ) -> list[MarkedText]:
        writer, tools = self._writer.told(example.beside.template_kwargs), example.beside.tools
        writer.refuse_losses(messages[: trained[-1] + 1], tools, opens=False)
        turns = [self._turn(messages[: number + 1], writer, tools) for number in trained]
        refuse_cuts(messages[: trained[-1]], turns[-1].prompt, answers=False)
        calls = [bool(messages[number].get("tool_calls")) for number in trained]
        turns = [self._stopped(turn, turns[-1].prompt, own) for turn, own in zip(turns, calls, strict=True)]
        whole = turns[-1].prompt + turns[-1].answer
        together = [turn for turn in turns if whole.startswith(turn.prompt + turn.answer)]
        alone = [turn for turn in turns if turn not in together]
        if alone and self._history == "refuse":
            raise Malformed(
                f"the chat template changes {len(alone)} of {len(turns)} trained turns once others follow: data.history rows"
                " makes a row of each"
            )
        rows = [self._marked([turn], turn.prompt + turn.answer, columns) for turn in alone]
        return [*rows, self._marked(together, whole, columns)]

    def _stopped(self, turn: _Turn, whole: str, calls: bool) -> _Turn:
        """Returns a turn that ends with the marker of the role that follows in ``whole``, or usually does, if nothing else ends it
        and the model stops there.
        """
        if turn.stopped or not self._next:
            return turn
        text, end = turn.prompt + turn.answer, self._next[calls]
        if whole.startswith(text):  # another turn follows
            if (opens := _opening_stop(whole[len(text) :], self.stops)) is None:
                return turn
            end = opens[0]
        return replace(turn, answer=turn.answer + end, stopped=True)

    def _marked(self, turns: Sequence[_Turn], text: str, columns: Mapping[str, float]) -> MarkedText:
        begin = len(turns[0].prompt)
        spans = tuple((len(turn.prompt) - begin, len(turn.prompt + turn.answer) - begin) for turn in turns)
        end = None if turns[-1].stopped else self.end
        return MarkedText(text[:begin], text[begin:], spans, True, end, columns, images=turns[-1].images)

    def _turn(self, messages: Sequence[Message], writer: TemplateWriter, tools: Tools | None) -> _Turn:
        """Returns the last message as the text that the model should write."""
        prompt = writer.write(messages[:-1], opens=True, tools=tools)
        text = writer.write(messages, opens=False, tools=tools)
        begin = in_common(prompt, text)
        if prompt[begin:].strip():
            opening = prompt[in_common(writer.write(messages[:-1], opens=False, tools=tools), prompt) :]
            begin = self._behind(opening, text, messages, writer, tools)
            if not begin:
                return self._unopened(prompt, text, opening, messages, writer, tools)
        end, stopped = self._end(text, begin, messages, writer, tools)
        if end <= begin:
            raise Malformed(f"the chat template leaves out message {len(messages)} (assistant)")
        words = str(messages[-1].get("content") or "").strip()
        first = text.rfind(words, 0, end)  # the prompt may have the empty thought that they begin with
        first = first if first < begin < first + len(words) else begin
        refuse_cuts(messages[-1:], text[first:end], answers=True, first=len(messages))
        answer = self._thought_once(prompt, text[begin:end], messages, writer, tools)
        return _Turn(prompt, answer, stopped, pictures_in(messages))

    def _thought_once(
        self, prompt: str, answer: str, messages: Sequence[Message], writer: TemplateWriter, tools: Tools | None
    ) -> str:
        """Returns the answer so that its thought is opened once and closed once, where the template takes an answer's own thoughts
        for words, or answers without thoughts for thoughts (Nemotron Nano, Kimi K2 Thinking, DeepSeek-V4).
        """
        words = str(messages[-1].get("content") or "").strip()
        own, left = thought_at_start(words), thought_at_end(prompt)
        before, _, after = answer.partition(words) if own else ("", "", "")
        doubled = own is not None and words in answer and thought_at_end(prompt + before) is not None
        unclosed = left is not None and not left.closed and left.close not in answer and not messages[-1].get("tool_calls")
        if not doubled and not unclosed:
            return answer
        opening = prompt[in_common(writer.write(messages[:-1], opens=False, tools=tools), prompt) :]
        if not doubled:
            return (empty_thought(opening, words) or "") + answer
        if own and before.strip().removeprefix(own.open).strip() == own.close:  # the template's empty one
            before = ""
        try:
            return before + without_opening(opening + before, words) + after
        except ClosedThoughtError:
            if not before.strip():
                raise
            raise Malformed(
                f"the chat template closes the thoughts of message {len(messages)} (assistant) itself, and its content begins"
                f" with {own and own.open!r}: give them as reasoning_content, or prompt and completion as texts"
            ) from None

    def _behind(self, opening: str, text: str, messages: Sequence[Message], writer: TemplateWriter, tools: Tools | None) -> int:
        """Finds where the answer begins in a template that changes the text before its opening (Hermes, Mistral); 0: unknown."""
        numbers = itertools.count()
        asked, answer = (writer.all_marked(message, numbers) for message in messages[-2:])
        words, mark = text_of(asked.get("content")), writer.mark
        if mark not in words:
            return 0
        try:
            if not opening.strip():
                opening = writer.write([*messages[:-2], asked], opens=True, tools=tools).partition(words)[2]
            ordered, seen = (
                writer.write([*before, answer], opens=False, tools=tools) for before in ([*messages[:-2], asked], messages[:-1])
            )
        except UserError:
            return 0
        if not opening.strip() or opening not in ordered.partition(words)[2].partition(mark)[0]:  # it is an earlier turn's
            return 0
        begin = seen.rfind(opening, 0, seen.find(mark)) + len(opening)
        return begin if text[:begin] == seen[:begin] else 0

    def _unopened(
        self, prompt: str, text: str, opening: str, messages: Sequence[Message], writer: TemplateWriter, tools: Tools | None
    ) -> _Turn:
        """Returns an answer to an opening that the template writes only for prompts, as DeepSeek-R1's does: the answer contains
        the opening, goes on from it, or follows an empty thought, which the prompt or the answer closes.
        """
        content, number = str(messages[-1].get("content") or ""), len(messages)
        opening = opening if opening.strip() else prompt  # a template may open an answer after every message
        if reasoning_of(messages[-1]):
            raise ClosedThoughtError(
                f"the reasoning of message {number} (assistant) has no place, because the chat template's prompt ends with"
                f" {opening.strip()[-40:]!r} (data.ignore leaves it unread)"
            )
        answer, tag, left = without_opening(prompt, content), last_tag(prompt), thought_at_end(opening)
        goes_on = tag[1:] and tag not in content and f"{tag[0]}/{tag[1:]}" in content
        closing = empty_thought(opening, answer)
        if (answer == content and not goes_on and closing is None) or messages[-1].get("tool_calls"):
            missing = tag or prompt[in_common(prompt, text) :].strip()[-40:]
            raise Malformed(
                f"the chat template prompts with {missing!r}, and does not write this before the answer of a conversation:"
                " let the answer begin with it, or give prompt and completion as texts"
            )
        end = self._words_end(text, in_common(prompt, text), messages, writer, tools)
        before = _written_before(content.strip(), text[:end], prompt)
        if left is not None and left.closed:
            before = before.rpartition(left.close)[2]
        if before and left is not None and (left.closed or (answer == content and not goes_on)):
            answer = (closing or "" if left.close not in before else "") + before + answer
        elif before and (left is None or before.strip() != left.close):
            raise Malformed(
                f"the chat template writes {before!r} before the answer of a conversation, and prompts with {tag!r}: give the"
                " thoughts as reasoning_content, or prompt and completion as texts"
            )
        elif answer == content and not goes_on:
            answer = (closing or "") + answer
        stop = next((found for known in (self.stops, self._special) if (found := _first(text[end:], known))), None)
        last = text[end : end + stop.end()] if stop else ""
        return _Turn(prompt, answer + last, stop is not None, pictures_in(messages))

    def _end(
        self, text: str, begin: int, messages: Sequence[Message], writer: TemplateWriter, tools: Tools | None
    ) -> tuple[int, bool]:
        """Returns where the answer ends, and True if it ends with a stop token."""
        words = self._words_end(text, begin, messages, writer, tools)
        for known in (self.stops, self._special):
            if found := _first(text[words:], known):
                return words + found.end(), True
        return (len(text) if messages[-1].get("tool_calls") or words <= begin else words), False

    def _words_end(
        self, text: str, begin: int, messages: Sequence[Message], writer: TemplateWriter, tools: Tools | None
    ) -> int:
        """Returns where the content of the last message ends."""
        content = str(messages[-1].get("content") or "")
        if messages[-1].get("tool_calls"):
            return self._calls_end(text, messages, writer, tools)
        for words in (content, content.strip()):
            if words and text.endswith(words + self._tail):
                return len(text) - len(self._tail)
        mark = secrets.token_hex(8)
        marked = [*messages[:-1], {**messages[-1], "content": mark}]
        try:
            _, seen, tail = writer.write(marked, opens=False, tools=tools).rpartition(mark)
        except UserError:
            seen, tail = "", ""
        if seen and text.endswith(tail) and len(text) - len(tail) >= begin:
            return len(text) - len(tail)
        if _first(content, self.stops | self._special):
            raise Malformed(f"cannot tell where the chat template ends message {len(messages)}, which has special tokens")
        return begin

    def _calls_end(self, text: str, messages: Sequence[Message], writer: TemplateWriter, tools: Tools | None) -> int:
        """Finds where the last call of the last message ends, at the latest: special tokens before it are not its end."""
        calls = [_with_arguments(call) for call in messages[-1]["tool_calls"]]
        marked = [*messages[:-1], writer.all_marked({**messages[-1], "tool_calls": calls}, itertools.count())]
        try:
            tail = writer.write(marked, opens=False, tools=tools).rpartition(writer.mark)[2]
        except UserError:
            raise Malformed(f"cannot tell where the chat template ends message {len(messages)}, which has calls") from None
        return len(text) - in_common(text[::-1], tail[::-1])


def _written_before(words: str, text: str, prompt: str) -> str:
    """Returns what a template writes before the words of an answer where a prompt ends otherwise: tags, but no spaces alone."""
    text = text.rstrip()
    if not words or not text.endswith(words):
        return ""
    begin = in_common(prompt, text)
    begin -= len(re.search(r"(?:[<\[][^<>\[\]]*)?$", text[:begin])[0])  # type: ignore[index]  # it matches any text
    before = text[begin : len(text) - len(words)]
    return before if before.strip() else ""


def _as_text(messages: Sequence[Message], trained: Sequence[int], example: Example) -> Example:
    """Returns a conversation of one turn as plain text. Raises ``Malformed`` for content that plain text has no form for."""
    if len(trained) > 1 or trained[0] != len(messages) - 1:
        raise Malformed(
            "a conversation of several turns needs a chat template: leave data.template unset and use a tokenizer that has one"
        )
    for number, message in enumerate(messages, start=1):
        lost = "tool calls" if message.get("tool_calls") else "reasoning" if reasoning_of(message) else ""
        if lost or message["role"] not in ("system", "user", "assistant"):
            what = lost or f"the role {message['role']!r}"
            raise Malformed(f"message {number}: {what} needs a chat template, and there is none")
    return Example(list(messages[:-1]), (messages[-1]["content"],), beside=example.beside)


def _with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a call that has some arguments."""
    function = call.get("function", call)
    return {**call, "function": {**function, "arguments": function.get("arguments") or {"m": ""}}}


def _opening_stop(text: str, stops: set[Any]) -> tuple[str, str] | None:
    """Returns the text up to the end of the stop token that it begins with, after spaces, and this token."""
    found = _first(text, stops)
    return (text[: found.end()], found[0]) if found is not None and not text[: found.start()].strip() else None


def _first(text: str, known: set[Any]) -> re.Match[str] | None:
    """Returns the first place of any of the tokens."""
    if not known:
        return None
    return re.search("|".join(re.escape(token) for token in sorted(known, key=lambda token: (-len(token), token))), text)
