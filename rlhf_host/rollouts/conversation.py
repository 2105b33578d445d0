"""The messages of an episode as a tree: every call of the policy with the tokens it saw and sampled, and the resulting rows.

A conversation only grows by appending tokens. If a program goes on from an answer, its next call is a child of that answer's
call, and sees exactly its tokens. If it changes or drops earlier messages, the call is a new root.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from rlhf_host.data.codec import text_of
from rlhf_host.data.contents import text_items
from rlhf_host.errors import UserError
from rlhf_host.records.episodes import Episode, EpisodeFailed, Generation, Message, Segment, Trajectory
from rlhf_host.records.messages import Reply
from rlhf_host.records.numbers import Numbers
from rlhf_host.records.pictures import Picture, Shown, images_of, pictures_in

Why = Literal["root", "extend", "edited", "tools", "template"]
"""Reason for a call's position: it follows another (``extend``), or it is a root, because nothing matches (``root``), a message
was changed (``edited``), the tools were (``tools``), or the chat template would write earlier turns differently (``template``).
"""
Status = Literal["pending", "done", "failed", "cancelled", "undelivered"]


class Codec(Protocol):
    """Methods of ``data.codec.ChatCodec`` that the tree needs."""

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Returns the tokens of a new conversation."""

    def delta(
        self, last: Message, new: Sequence[Message], sampled: Sequence[int], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Returns the tokens between an answer and the next one."""

    def rewrites(
        self, messages: Sequence[Message], new: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> bool:
        """Returns True if the chat template writes ``messages`` differently once ``new`` follow."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Position of a call, and the tokens it adds there."""

    parent: Call | None
    added: Sequence[int]
    why: Why
    path: bytes = b""
    """Digest of the whole conversation that it sees; empty if tokens were given."""
    new: Sequence[Message] = ()
    """Messages that are not in the parent's conversation."""
    images: Sequence[Picture] = ()
    """The pictures of ``added``."""


@dataclass(slots=True, eq=False)
class Call:
    """One call of the policy."""

    number: int
    parent: Call | None
    added: Numbers
    """Tokens between the parent's answer and this one; at a root the whole prompt."""
    why: Why
    path: bytes
    new: Sequence[Message] = ()
    begins: int = 0
    """Length of the prompt, in tokens."""
    images: Sequence[Picture] = ()
    """The pictures of ``added``."""
    generation: Generation | None = None
    reply: Reply | None = None
    shown: Reply | None = None
    """The answer as OpenAI's API gives it: without the stop text of the request that ended it."""
    status: Status = "pending"
    reason: str = ""
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0

    @property
    def id(self) -> str:
        return f"call-{self.number}"

    @property
    def ends(self) -> int:
        """Length of prompt and answer, in tokens."""
        return self.begins + (len(self.generation.token_ids) if self.generation else 0)

    @property
    def line(self) -> list[Call]:
        """Calls from its root to itself."""
        line: list[Call] = []
        call: Call | None = self
        while call is not None:
            line.append(call)
            call = call.parent
        return line[::-1]

    @property
    def prompt_ids(self) -> list[int]:
        ids: list[int] = []
        for call in self.line:
            if call.parent is not None and call.parent.generation is not None:
                ids.extend(call.parent.generation.token_ids)
            ids.extend(call.added)
        return ids

    @property
    def prompt_images(self) -> tuple[Picture, ...]:
        """The pictures of ``prompt_ids``."""
        return tuple(picture for _, picture in self.prompt_shown)

    @property
    def prompt_shown(self) -> list[Shown]:
        """The same, each with the place where its part begins."""
        return [(call.begins - len(call.added), picture) for call in self.line for picture in call.images]


class Tree:
    """Calls of one attempt at an episode. No I/O and no engine; not thread-safe.

    Args:
        codec: turns messages into tokens; without it, calls must give tokens.
        history: ``append``: earlier turns stay as they were sampled. ``template``: a new root if the chat template would write
            them differently. ``refuse``: an error in that case.
        numbers: numbers of calls, if several trees share them.
    """

    def __init__(
        self,
        codec: Codec | None = None,
        history: Literal["append", "template", "refuse"] = "append",
        numbers: Iterator[int] | None = None,
    ):
        self.codec, self.history = codec, history
        self._numbers = numbers or itertools.count()
        self.calls: list[Call] = []
        self._said: dict[bytes, list[Call]] = {}  # conversation up to an answer → the calls that gave it
        self._ended: dict[int, dict[bytes, Call]] = {}  # length → digest of the tokens up to an answer's end → its call
        self._unread: list[Call] = []  # not in it yet
        self._tools: set[bytes] = set()

    def plan(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> Plan:
        """Returns where the answer to ``messages`` belongs. Raises ``UserError`` for a conversation that the policy cannot
        answer.
        """
        assert self.codec is not None
        if not messages:
            raise UserError("a conversation without messages")
        if messages[-1].get("role") == "assistant":
            raise UserError(
                "the conversation ends with the assistant's own message: end it with a message for the assistant to answer"
            )
        start = _digest(tools or [])
        path = list(_paths(start, messages))
        found: Call | None = None
        until = 0
        for place in range(len(messages) - 1, -1, -1):
            if messages[place].get("role") == "assistant" and (known := self._said.get(path[place])):
                found, until = self._meant(known, messages[place]), place + 1
                break
        new = messages[until:]
        why: Why = "extend"
        if found is None:
            why = "tools" if self._tools and start not in self._tools else "edited" if self._edited(messages) else "root"
        elif any(message.get("role") == "assistant" for message in new):
            why = "edited"
        elif self.history != "append" and self.codec.rewrites(_thinking(messages[:until], found), new, tools):
            if self.history == "refuse":
                raise EpisodeFailed(
                    "the chat template writes earlier turns differently once others follow, and rollout.history is refuse"
                )
            why = "template"
        self._tools.add(start)
        if why == "extend":
            assert found is not None
            assert found.generation is not None
            last, sampled = messages[until - 1], found.generation.token_ids
            return Plan(found, self.codec.delta(last, new, sampled, tools=tools), why, path[-1], new, pictures_in(new))
        seen = [*_thinking(messages[:until], found), *new] if found is not None and why == "template" else messages
        return Plan(None, self.codec.render(seen, tools), why, path[-1], messages, pictures_in(seen))

    def plan_ids(self, token_ids: Sequence[int]) -> Plan:
        """Returns the same as ``plan`` for tokens: after the longest answer with which they begin."""
        for call in self._unread:
            assert call.generation is not None
            ids = np.asarray([*call.prompt_ids, *call.generation.token_ids], np.int32)
            self._ended.setdefault(len(ids), {})[_of_ids(ids)] = call
        self._unread.clear()
        ids, images = np.asarray(token_ids, np.int32), images_of(token_ids)
        for length in sorted((length for length in self._ended if length <= len(ids)), reverse=True):
            before = self._ended[length].get(_of_ids(ids[:length]))
            if before is not None and images[: len(before.prompt_images)] == before.prompt_images:
                return Plan(before, token_ids[length:], "extend", images=images[len(before.prompt_images) :])
        return Plan(None, token_ids, "root", images=images)

    def begin(self, plan: Plan) -> Call:
        """Returns a call that waits for its answer."""
        if plan.parent is not None and plan.parent.status == "undelivered":
            plan.parent.status = "done"
        begins = len(plan.added) + (plan.parent.ends if plan.parent else 0)
        added = Numbers("i", plan.added)
        call = Call(next(self._numbers), plan.parent, added, plan.why, plan.path, plan.new, begins, plan.images)
        self.calls.append(call)
        return call

    def done(self, call: Call, generation: Generation, reply: Reply | None = None) -> None:
        """Stores the answer. From now on, calls that follow it can be planned."""
        known = call.parent.ends - 1 if call.parent else 0  # the parent's own answer has told of these tokens
        generation.traces = {name: values[known:].copy() for name, values in generation.traces.items()}
        call.generation, call.status = generation, "done"
        call.seconds = time.monotonic() - call.started
        self._unread.append(call)
        if reply is None:
            return
        call.reply = reply
        self.show(call, reply)

    def show(self, call: Call, reply: Reply) -> None:
        """Stores another form in which the caller gets the answer: messages may repeat it in any of them."""
        reply.call_id, call.shown = call.id, reply
        known = self._said.setdefault(_next(call.path, reply.message, ()), [])
        if call not in known:
            known.append(call)

    def drop(self, call: Call, status: Status, reason: str = "") -> None:
        """Drops a call that failed or whose answer did not arrive. It trains nothing, unless a later call goes on from it."""
        call.status, call.reason = status, reason
        if call.generation is None:
            call.seconds = time.monotonic() - call.started

    def rows(self, episode: Episode, role: str = "", final: str | None = None) -> list[Trajectory]:
        """Returns the trajectories so far. Every answer is an action in exactly one of them, and part of the prompt in those
        that branch off after it. They are in the order of their first own answers. Only the one with the last answer, or with
        the answer ``final``, is final.
        """
        done = [call for call in self.calls if call.status == "done"]
        inner = {id(call.parent) for call in done}
        owner: dict[int, list[Call]] = {}
        rows: list[list[Call]] = []
        for leaf in (call for call in done if id(call) not in inner):
            row = [call for call in leaf.line if id(call) not in owner]
            rows.append(row)
            owner |= dict.fromkeys(map(id, row), row)
        rows.sort(key=lambda row: row[0].number)
        numbers = {id(row): number for number, row in enumerate(rows)}
        answer_call = next((call for call in done if call.id == final), done[-1] if done else None)
        made = []
        for number, row in enumerate(rows):
            first, last = row[0], row[-1]
            segments = [Segment("prompt", Numbers("i", first.prompt_ids), images=first.prompt_images)]
            for call in row:
                if call is not first and call.added:
                    segments.append(Segment("observation", call.added, images=call.images))
                answer = call.generation
                assert answer is not None
                segments.append(Segment("action", answer.token_ids, answer.logprobs, answer.versions))
            assert last.generation is not None
            told = [call.generation.traces for call in last.line if call.generation is not None]
            trajectory = Trajectory(
                episode.episode_id,
                episode.group_id,
                episode.task,
                segments,
                last.generation.finish_reason,
                episode.sample,
                row=number,
                role=role,
                final=answer_call in row,
                traces={name: np.concatenate([one[name] for one in told]) for name in set(told[0]).intersection(*told)},
            )
            if first.parent is not None:
                trajectory.parent, trajectory.branch = numbers[id(owner[id(first.parent)])], first.parent.ends
            made.append(trajectory)
        return made

    def _meant(self, calls: Sequence[Call], message: Message) -> Call:
        """Returns the call meant, of several with the same answer: the one whose tool calls match, else the last."""
        ids = [call.get("id") for call in message.get("tool_calls") or ()]
        same = [call for call in calls if ids and call.reply and [each.id for each in call.reply.tool_calls] == ids]
        return (same or calls)[-1]

    def _edited(self, messages: Sequence[Message]) -> bool:
        """Returns True if the conversation has answers, but none from this tree."""
        return bool(self._said) and any(message.get("role") == "assistant" for message in messages)


def _thinking(messages: Sequence[Message], last: Call) -> list[Message]:
    """Returns the conversation up to the answer of ``last``, with the reasoning of its answers."""
    seen = [dict(message) for message in messages]
    places = [place for place, message in enumerate(seen) if message.get("role") == "assistant"]
    line = [call for call in last.line if call.reply is not None]
    for place, call in zip(reversed(places), reversed(line), strict=False):
        if call.reply is not None and call.reply.reasoning:
            seen[place]["reasoning_content"] = seen[place]["thinking"] = call.reply.reasoning
    return seen


def _paths(start: bytes, messages: Sequence[Message]) -> Iterator[bytes]:
    """Yields a digest for each prefix of the conversation."""
    path = start
    names: tuple[Any, ...] = ()
    for message in messages:
        path = _next(path, message, names)
        if message.get("role") == "assistant":
            names = tuple(call.get("id") for call in message.get("tool_calls") or ())
        yield path


def _next(path: bytes, message: Message, names: Sequence[Any]) -> bytes:
    """Returns the digest after one more message. It leaves out reasoning, because programs do, and names a tool's call by
    position, because programs invent their own ids.
    """
    role = {"developer": "system"}.get(str(message.get("role")), message.get("role"))
    content: Any = text_of(message.get("content"))
    if keys := [picture.key for picture in pictures_in([message])]:
        content = [text_items(message.get("content")), keys]
    if role != "assistant":
        number = message.get("tool_call_id")
        return _digest([role, content, names.index(number) if number in names else message.get("name")], path)
    calls = [_plain(call.get("function", call)) for call in message.get("tool_calls") or ()]
    return _digest([role, content.strip() if isinstance(content, str) else content, calls], path)


def _plain(function: Mapping[str, Any]) -> list[Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {"": arguments}
    return [function.get("name"), arguments or {}]


def _digest(value: Any, before: bytes = b"") -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _of_ids(ids: np.ndarray) -> bytes:
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
