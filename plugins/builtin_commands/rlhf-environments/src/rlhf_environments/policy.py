"""A policy that is somebody else: it is asked with messages and answers with one, and the host plays episodes with it.

``text_policy`` is the host's ``Policy`` for one episode over a function that answers. ``TextEpisodes`` plays whole episodes.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from rlhf_environments.text_tokens import VOCABULARY, TextCodec, message_tokens, messages_of, text_tokenizer
from rlhf_host import Episode, EpisodeFailed, Generation, Message, Policy, Sampling, Task, Trajectory
from rlhf_host.internals import EpisodePolicy, Episodes, EpisodeSettings, Gate, Numbers, PluginManager, SampledModel

MOST_TOKENS = 1 << 30
"""Longest conversation, in bytes."""


@dataclass(frozen=True, slots=True)
class Question:
    """Question to the policy: a whole conversation, and the tools that it has."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()

    @property
    def new(self) -> Sequence[Message]:
        """The messages after the policy's last answer."""
        last = [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]
        return self.messages[last[-1] + 1 :] if last else self.messages

    @property
    def answers(self) -> int:
        """Number of the policy's answers in it."""
        return sum(message["role"] == "assistant" for message in self.messages)


@dataclass(frozen=True, slots=True)
class Answer:
    """The policy's message. ``tool_calls`` are in the form of OpenAI's chat completions; ``truncated``: it was cut at its limit."""

    content: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    truncated: bool = False
    reasoning: str | None = None

    @property
    def message(self) -> Message:
        said: Message = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            said["tool_calls"] = [*map(dict, self.tool_calls)]
        if self.reasoning:
            said["reasoning"] = self.reasoning
        return said


Ask = Callable[[Question], Awaitable[Answer]]


class _NoEngine:
    """Stands for the engine: episodes announce themselves to it, and nothing is generated here."""

    def expect(self, number: int) -> None:
        """Waits for nobody: there are no batches."""


def _with_their_ids(messages: Sequence[Message]) -> list[Message]:
    """Returns messages in which results of tools name the calls as the other side does: the host has ids of its own."""
    told: list[Message] = []
    open_calls: list[Mapping[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            open_calls = [*(message.get("tool_calls") or ())]
        elif message["role"] == "tool" and open_calls:
            named = [call for call in open_calls if call.get("function", call).get("name") == message.get("name")]
            call = (named or open_calls)[0]
            open_calls.remove(call)
            message = {**message, "tool_call_id": call.get("id") or message.get("tool_call_id")}
        told.append(message)
    return told


class TextEpisodes(Episodes):
    """The host's episodes, with somebody who is asked for a policy."""

    ask: Ask

    @classmethod
    def of(cls, manager: PluginManager, settings: EpisodeSettings) -> TextEpisodes:
        engine = Gate(cast(Any, _NoEngine()))
        model = SampledModel(engine=engine, tokenizer=text_tokenizer(), engine_name="the other side", vocabulary=VOCABULARY)
        sampling = replace(settings.sampling, max_new_tokens=MOST_TOKENS)
        return cls(manager, model, replace(settings, sampling=sampling, max_tokens=MOST_TOKENS))

    def codec_of(self, task: Task) -> TextCodec:  # type: ignore[override]
        return TextCodec(self.settings.data.system_prompt)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: Any) -> Generation:
        """Returns what the other side answers. Raises ``EpisodeFailed`` for tokens that are no conversation."""
        try:
            messages = messages_of(token_ids)
        except ValueError as error:
            raise EpisodeFailed(
                "the agent asks the policy with tokens of its own, and the other side has only texts"
            ) from error
        tools = messages.pop(0)["tools"] if messages and "tools" in messages[0] else ()
        answer = await self.ask(Question(_with_their_ids(messages), tools))
        ids = message_tokens(answer.message)
        logprobs, versions = Numbers("d", [0.0] * len(ids)), Numbers("i", [0] * len(ids))
        return Generation(Numbers("i", ids), logprobs, versions, "length" if answer.truncated else "stop")

    def answered_by(self, ask: Ask) -> TextEpisodes:
        """Returns the same episodes, with which it shares limits, of a policy that ``ask`` asks."""
        own = copy.copy(self)
        own.ask = ask
        return own

    async def play_with(self, episode: Episode, ask: Ask) -> list[Trajectory]:
        """Plays one episode. Raises ``EpisodeFailed`` as the host does."""
        return await self.answered_by(ask).play(episode)


def text_policy(episode: Episode, ask: Ask, settings: EpisodeSettings | None = None) -> Policy:
    """Returns the host's ``Policy`` for one episode: ``chat`` asks ``ask``, and ``trajectories`` has all that was said.

    Texts of its trajectories can be read as in a run. Numbers of tokens are numbers of bytes, and log-probabilities are 0.
    """
    chosen = (
        EpisodeSettings(sampling=Sampling(max_new_tokens=MOST_TOKENS), max_tokens=MOST_TOKENS) if settings is None else settings
    )
    episodes = TextEpisodes.of(PluginManager([]), chosen).answered_by(ask)
    return EpisodePolicy(episode, episodes)
