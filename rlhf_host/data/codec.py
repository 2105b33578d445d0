"""Chat messages as tokens, and sampled tokens as messages.

The chat template renders a conversation once, at its beginning. The tokens after an answer are found by the *marker delta*: the
template renders a conversation with a marker in place of the answer, and only the text after the marker is tokenised. So
sampled tokens are never decoded and tokenised again, and it does not matter what a template does to earlier turns.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_host.data import contents, tool_formats
from rlhf_host.data.answer_reader import AnswerReader
from rlhf_host.data.chat import NO_TEMPLATE, conversation, encode, render_prompts
from rlhf_host.data.pictures import as_messages
from rlhf_host.data.processor import Processor, refuse_unseen
from rlhf_host.data.template_writer import MEMO, WITHOUT_TOOLS, TemplateWriter, Tools, reasoning_of, refuse_cuts
from rlhf_host.data.templates import uses_chat_template
from rlhf_host.errors import UserError
from rlhf_host.records.episodes import EpisodeFailed, FinishReason, Message
from rlhf_host.records.messages import Reply
from rlhf_host.records.pictures import Picture, pictures_in


@dataclass(frozen=True, slots=True)
class _Junction:
    """Place where an answer ends and new text begins: a special token's text and id, and all text from there on."""

    stop: str
    stop_id: int
    text: str
    closes: bool
    """True if the token ends the answer; otherwise it opens the next turn."""
    header: int
    """Length of the template's own text before the first new content."""


class ChatCodec:
    """Converts messages to tokens and back, for one tokenizer and its chat template, or for plain text.

    Args:
        template: as ``data.template``; None: the tokenizer's chat template, if it has one.
        system_prompt: used for conversations without one.
        tool_format: how the model writes tool calls: ``auto``, ``none``, or a name of ``tool_formats.FORMATS``.
        stop_ids: tokens that end an answer, beside the tokenizer's end of sequence and the chat template's own.

    Raises ``UserError`` for an unknown ``tool_format``.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | None = None,
        *,
        system_prompt: str | None = None,
        tool_format: str = "auto",
        stop_ids: Collection[int] = (),
    ):
        self.tokenizer, self.template, self.system_prompt = tokenizer, template, system_prompt
        self.chat = uses_chat_template(tokenizer, template)
        self._reader = AnswerReader(tokenizer, tool_format, self.chat)
        self.tool_format = self._reader.tool_format
        self.writer = TemplateWriter(tokenizer)
        self._mark = self.writer.mark
        self._given_stops = frozenset(stop_ids)
        self._stops: frozenset[int] | None = None
        self._specials: dict[str, int] | None = None
        self._endings: dict[str, str] = {}
        self._rewritten: dict[str, bool] = {}
        self._begins: str | None = None

    # --- messages to tokens ---------------------------------------------------------------------

    def render(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """Returns the tokens of a new conversation, ready for an answer. Raises ``EpisodeFailed`` for messages that the chat
        template refuses or leaves out.
        """
        self._refuse_pictures(messages)
        if not self.chat:
            said = [{**message, "content": text_of(message.get("content"))} for message in messages]
            if any("tool_calls" in message or message["role"] == "tool" for message in said) or tools:
                raise EpisodeFailed(f"codec: plain text has no tools: {WITHOUT_TOOLS}")
            ids = self._told(lambda: render_prompts([said], self.tokenizer, self.system_prompt, self.template)[0])
            if not ids:
                raise UserError("the conversation has no text")
            return ids
        messages = conversation(messages, self.system_prompt)
        text = self._told(lambda: self._write(messages, True, tools))
        self._told(lambda: self.writer.refuse_losses(messages, tools, opens=True, words_alone=True))
        self._told(lambda: refuse_cuts(messages, text, answers=False))
        return self._tokens(text, pictures_in(messages), whole=True)

    def _tokens(self, text: str, pictures: Sequence[Picture], *, whole: bool = False) -> list[int]:
        """Returns the tokens of a template's text, with those of its pictures."""
        ids: list[int] = self._told(lambda: encode([text], self.tokenizer, special=False)[0])
        if not pictures:
            self._told(lambda: refuse_unseen(self.tokenizer, ids))
            return ids
        return list(self._told(lambda: Processor.of(self.tokenizer).expand(ids, pictures, text if whole else None)))

    def delta(self, last: Message, new: Sequence[Message], sampled: Sequence[int], *, tools: Tools | None = None) -> list[int]:
        """Returns the tokens to append after an answer, so that the policy can give the next one.

        These tokens are what the chat template writes after an assistant's message: the rest of its turn's ending, ``new``, and
        the opening of the next assistant turn. If the answer ended by itself, its last token replaces the template's ending.
        Without a chat template they are only the texts of ``new``.

        Args:
            last: the answer as a message, ``tool_calls`` included.
            new: messages since the answer; none of the assistant's.
            sampled: the answer's tokens.

        Raises ``EpisodeFailed`` for messages that the chat template refuses or leaves out, naming them.
        """
        self._refuse_pictures(new)
        for message in new:
            text = text_of(message.get("content"))
            if text.strip() and not self._told(lambda text=text: encode([text], self.tokenizer, special=False)[0]):
                raise EpisodeFailed(f"codec: the tokenizer has no tokens for the text {text[:40]!r}")
        if not self.chat:
            return self._told(
                lambda: encode(["\n".join(text_of(message.get("content")) for message in new)], self.tokenizer, special=False)[
                    0
                ]
            )
        junction = self._junction(last, new, tools)
        last_id = sampled[-1] if sampled else None
        keeps, text = True, junction.text
        if last_id is not None and (last_id in self.stop_ids or last_id == junction.stop_id):
            own = self._text_of_token(last_id)
            if own and (place := text.find(own, 0, junction.header)) >= 0:
                text, keeps = text[place:], False
                junction = replace(junction, stop=own, stop_id=last_id)
            else:
                keeps = not junction.closes
        ids = self._tokens(text, pictures_in(new))
        if not ids or ids[0] != junction.stop_id:
            raise EpisodeFailed(f"codec: the tokenizer does not read the chat template's {junction.stop!r} as one token")
        return ids if keeps else ids[1:]

    def rewrites(self, messages: Sequence[Message], new: Sequence[Message], tools: Tools | None = None) -> bool:
        """Returns True if the chat template writes ``messages``, which end with an answer, differently once ``new`` follow."""
        if not self.chat:
            return False
        shape = json.dumps([[_shape(message) for message in part] for part in (messages, new)] + [bool(tools)])
        if shape not in self._rewritten:
            _bound(self._rewritten)
            marks = itertools.count()
            marked = [self.writer.marked(message, marks) for message in conversation(messages, self.system_prompt)]
            before = self._told(lambda: self._write(marked, False, tools))
            end = before.rfind(self._mark) + len(self._mark)
            after = self._told(lambda: self._write([*marked, *(self.writer.marked(one, marks) for one in new)], True, tools))
            self._rewritten[shape] = not after.startswith(before[:end])
        return self._rewritten[shape]

    # --- tokens to messages ---------------------------------------------------------------------

    def parse(
        self,
        sampled: Sequence[int],
        *,
        tools: Tools | None = None,
        finish_reason: FinishReason = "stop",
        stop: Sequence[str] = (),
    ) -> Reply:
        """Returns an answer as a message: content, reasoning and, if there are ``tools``, calls. Parts that cannot be read,
        such as calls that are not JSON, stay text in ``content`` and are listed in ``problems``. The message ends before the
        first of the texts ``stop``.
        """
        ids = list(sampled)
        while ids and ids[-1] in self.stop_ids:
            ids.pop()
        return self._told(lambda: self._reader.read(ids, self._opening, tools, finish_reason, stop))

    # --- what the chat template does --------------------------------------------------------------

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        if self._stops is None:
            stops = set(self._given_stops)
            if self.tokenizer.eos_token_id is not None:
                stops.add(self.tokenizer.eos_token_id)
            if self.chat:
                with contextlib.suppress(EpisodeFailed):  # a template without assistants; one turn needs no more
                    first = self._first_special(self._ending({"role": "assistant", "content": ""}, None))
                    stops |= {first[1]} if first else set()
            self._stops = frozenset(stops)
        return self._stops

    @property
    def reads_calls(self) -> bool:
        """True if ``parse`` can find calls."""
        return self._reader.reads_calls

    def check(self, tools: Tools | None = None) -> None:
        """Raises ``UserError`` for a chat template in which conversations of several turns, or with ``tools``, cannot go on."""
        if not self.chat:
            return
        said: Message = {"role": "assistant", "content": "a"}
        new: list[Message] = [{"role": "user", "content": "u"}]
        if tools:
            name = tools[0].get("function", tools[0])["name"]
            call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": {}}}
            said, new = {**said, "content": "", "tool_calls": [call]}, [_result(call, "result")]
        try:
            self.render([{"role": "user", "content": "x"}], tools)
            self.delta(said, new, [], tools=tools)
        except EpisodeFailed as failure:
            raise UserError(failure.reason.removeprefix("codec: ")) from failure
        if tools and not self.reads_calls:
            known = ", ".join(tool_formats.FORMATS)
            raise UserError(
                f"the form in which this chat template writes calls is not known, so none would be read: choose one of {known} as"
                f" rollout.tool_format, give the tokenizer a response_template, or {WITHOUT_TOOLS}"
            )

    def _junction(self, last: Message, new: Sequence[Message], tools: Tools | None) -> _Junction:
        calls = last.get("tool_calls")
        answers = any(message.get("role") == "tool" for message in new)
        if calls and not answers and self._mark not in self._told(lambda: self._write(self._opened(last), False, tools)):
            last = {"role": "assistant", "content": last.get("content")}  # a call that nobody answers need not be written
        ending = self._ending(last, tools)
        counter = itertools.count()
        marks = [self.writer.marked(message, counter) for message in new]
        opened = self._opened(last)
        skeleton = self._behind(self._told(lambda: self._write([*opened, *marks], True, tools)))
        place = 0
        for message, mark in zip(new, marks, strict=True):
            if text_of(message.get("content")):
                place = skeleton.find(mark["content"], place)
                if place < 0:
                    kind = f"a message of the role {message.get('role')!r}"
                    way = f": {WITHOUT_TOOLS}" if message.get("role") == "tool" else ": give it another role"
                    raise EpisodeFailed(f"codec: the chat template leaves out {kind}{way}")
        text = self._behind(self._told(lambda: self._write([*opened, *new], True, tools)))
        self._hold(new, text)
        first, own = self._first_special(text), self._first_special(ending)
        filled = [str(mark["content"]) for mark in marks if self._mark in text_of(mark.get("content"))]
        header = skeleton.find(filled[0]) if filled else len(text)
        if first is None or first[0] >= header:  # the first special token is a content's
            raise EpisodeFailed(
                "codec: the chat template ends an answer without a special token, so nothing can be appended to one: use another"
                " template, or plain text (data.template none)"
            )
        stop = text[first[0] : first[0] + first[2]]
        return _Junction(stop, first[1], text[first[0] :], own is not None and own[1] == first[1], header - first[0])

    def _ending(self, last: Message, tools: Tools | None) -> str:
        """Returns what the template writes after an answer of this shape if nothing follows."""
        shape = json.dumps([_shape(last), bool(tools)])
        if shape not in self._endings:
            written = self._told(lambda: self._write(self._opened(last), False, tools))
            if last.get("tool_calls") and self._mark not in written:
                raise EpisodeFailed(f"codec: the chat template leaves out tool calls: {WITHOUT_TOOLS}")
            _bound(self._endings)
            self._endings[shape] = self._behind(written)
        return self._endings[shape]

    def _behind(self, written: str) -> str:
        """Returns the text after the answer's mark. A special token that quotes the mark, as in Gemma's calls, belongs to the
        mark.
        """
        before, mark, behind = written.rpartition(self._mark + "-a")
        if not mark:
            raise EpisodeFailed(
                "codec: the chat template leaves out earlier answers, so no conversation can go on token by token"
            )
        first = self._first_special(behind)
        quote = behind[: first[2]] if first and first[0] == 0 else ""
        return behind.removeprefix(quote) if quote and before.endswith(quote) else behind

    def _opened(self, last: Message) -> list[Message]:
        """Returns a conversation that ends with the answer, whose last words are a mark."""
        mark = self._mark + "-a"
        answer: Message = {"role": "assistant", "content": mark}
        if calls := last.get("tool_calls"):
            answer["content"] = ""
            answer["tool_calls"] = [
                {**call, "type": "function", "function": {**call.get("function", call), "arguments": {"m": "x"}}}
                for call in calls
            ]
            answer["tool_calls"][-1]["function"]["arguments"] = {"m": mark}
        return [{"role": "user", "content": "x"}, answer]

    def _hold(self, new: Sequence[Message], text: str) -> None:
        """Raises ``EpisodeFailed`` if the text of a message is missing in the template's output, or out of order."""
        place = 0
        texts = ((message, words.strip()) for message in new for words in contents.texts_of(message.get("content")))
        for message, words in texts:
            forms = (words, json.dumps(words, ensure_ascii=False)[1:-1], json.dumps(words)[1:-1], " ".join(words.split()))
            found = [at + len(form) for form in forms if (at := text.find(form, place)) >= 0]
            if not found:
                raise EpisodeFailed(
                    f"codec: the chat template changes a message of the role {message.get('role')!r}: {words[:60]!r}"
                )
            place = min(found)

    def _refuse_pictures(self, messages: Sequence[Message]) -> None:
        parts = [part for message in messages for part in contents.pictures(message.get("content"))]
        if unread := next((part for part in parts if not isinstance(part.get("image"), Picture)), None):
            raise EpisodeFailed(f"codec: a message has a part of the type {unread['type']!r}, and its picture was not read")
        if parts and not self.chat:
            raise EpisodeFailed(f"codec: {NO_TEMPLATE}")

    def _write(self, messages: Sequence[Message], opens: bool, tools: Tools | None) -> str:
        return self.writer.write(messages, opens=opens, tools=tools)

    @property
    def _opening(self) -> str:
        """Text that the template writes before an answer."""
        if self._begins is None:
            messages: list[Message] = [{"role": "user", "content": self._mark}]
            before = self._told(lambda: self._write(messages, False, None)) if self.chat else ""
            after = self._told(lambda: self._write(messages, True, None)) if self.chat else ""
            self._begins = after[len(before) :] if after.startswith(before) else ""
        return self._begins

    def _first_special(self, text: str) -> tuple[int, int, int] | None:
        """Returns place, id and length of the first special token in a text."""
        if self._specials is None:
            added = getattr(self.tokenizer, "added_tokens_decoder", {})
            self._specials = {token.content: number for number, token in added.items() if token.special}
            self._specials |= {
                self.tokenizer.convert_ids_to_tokens(number): number for number in self.tokenizer.all_special_ids
            }
        found = [(place, -len(token), number) for token, number in self._specials.items() if (place := text.find(token)) >= 0]
        if not found:
            return None
        place, length, number = min(found)
        return place, number, -length

    def _text_of_token(self, number: int) -> str:
        return str(self.tokenizer.decode([number], skip_special_tokens=False))

    @staticmethod
    def _told(work: Any) -> Any:
        """Turns the template's refusal into a failure of one episode, not of the run."""
        try:
            return work()
        except UserError as error:
            raise EpisodeFailed(f"codec: {error}") from error


def text_of(content: Any) -> str:
    """Returns a message's content as one text. Raises ``EpisodeFailed`` for content that is not text."""
    try:
        return contents.text_of(content)
    except UserError as error:
        raise EpisodeFailed(f"codec: {error}") from error


def with_pictures(messages: Sequence[Message]) -> Sequence[Message]:
    """Returns messages of a program with the pictures of their parts. Raises ``EpisodeFailed`` for one that cannot be read."""
    if not any(contents.has_pictures(message.get("content")) for message in messages):
        return messages
    try:
        return as_messages(messages)
    except UserError as error:
        raise EpisodeFailed(f"codec: {error}") from error


def _bound(memo: dict[str, Any]) -> None:
    if len(memo) >= MEMO:
        memo.clear()


def _shape(message: Message) -> list[Any]:
    """Returns everything in a message that affects the form of the template's output."""
    calls = [call.get("function", call).get("name") for call in message.get("tool_calls") or ()]
    kinds = [part["type"] for part in contents.text_items(message.get("content"))]
    return [message.get("role"), kinds, bool(reasoning_of(message)), calls]


def _result(call: Mapping[str, Any], text: str) -> Message:
    return {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": text}
