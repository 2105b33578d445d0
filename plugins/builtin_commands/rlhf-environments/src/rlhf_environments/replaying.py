"""Whole conversations judged at their end: played again into an episode of their own, and compared with what it showed.

Some projects run tools one by one and send everything at the end. Tools are then run by a trial: the same episode with the same
seed, which gets each call as an answer; where that ends the episode, the call may be another one of the message before it. What
counts is the replay of the whole answers, with the calls that each really had. A tool whose result is another one in the replay
is an error: the environment is not the same twice.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_environments.playing import Environment, Play, Result
from rlhf_environments.policy import Answer, Question
from rlhf_environments.serving import text_of
from rlhf_host import EpisodeFailed

OVER = "The episode is over: no more calls are run."


class Judged:
    """An episode whose answers come in parts: calls of tools at once, whole messages later."""

    def __init__(self, play: Play, first: Question):
        self.play, self.turn = play, first
        self._trial: Play | None = None
        self._tried: list[list[Mapping[str, Any]]] = []
        """The calls that the trial had, a list for each message."""
        self._over = False
        self._calls, self._one_at_a_time = itertools.count(), asyncio.Lock()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Runs a tool in the trial; returns its result. Raises ``EpisodeFailed`` where the episode fails.

        Nobody says which calls are of one message. So where a message of its own ends the episode, the call is tried as a further
        one of the message before it.
        """
        call = {"id": f"trial-{next(self._calls)}", "function": {"name": name, "arguments": dict(arguments)}}
        async with self._one_at_a_time:
            if self._over:
                return OVER
            told = await self._try([*self._tried, [call]])
            if isinstance(told, Result) and self._tried:
                told = await self._try([*self._tried[:-1], [*self._tried[-1], call]])
            if isinstance(told, Result):
                self._over = True
                return OVER
        tools = [one for one in told.new if one["role"] == "tool"]
        own = [one for one in tools if one.get("tool_call_id") == call["id"]] or tools
        return "\n".join(text_of(one.get("content")) for one in own) or told_text(told)

    async def _try(self, messages: list[list[Mapping[str, Any]]]) -> Question | Result:
        """Returns what comes of the last message of calls, in a trial that had those before it."""
        if self._trial is None or self._trial.over or messages[:-1] != self._tried:
            await self._end_trial()
            self._trial, _ = await self.play.environment.again(self.play)
            for answer in [*self.play.answers, *(Answer(tool_calls=calls) for calls in messages[:-1])]:
                await self._trial.answer(answer)
        told = await self._trial.answer(Answer(tool_calls=messages[-1]))
        if isinstance(told, Question):
            self._tried = messages
        return told

    async def _end_trial(self) -> None:
        if self._trial is not None:
            await self._trial.close()
            self._trial = None

    async def replay(self, messages: Sequence[Mapping[str, Any]], truncated: bool = False) -> Question | Result:
        """Plays assistant's messages, each with the results of its calls behind it, and returns what comes of the last one.

        Args:
            messages: those since the last replay, in the form of OpenAI's chat completions.
            truncated: the last answer was cut at its limit.

        Raises:
            EpisodeFailed: the episode failed, or a tool had another result than before.
        """
        await self._end_trial()
        self._tried, self._over = [], False
        said = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
        if not said:
            raise EpisodeFailed("there is no answer to judge")
        told: Question | Result = self.turn
        for number, end in itertools.pairwise([*said, len(messages)]):
            message = messages[number]
            last = number == said[-1]
            answer = Answer(str(message.get("content") or ""), message.get("tool_calls") or (), truncated and last)
            told = await self.play.answer(answer)
            if isinstance(told, Result):
                if further := [one for one in messages[number + 1 :] if one.get("role") not in ("assistant", "tool")]:
                    text = text_of(further[0].get("content"))
                    raise EpisodeFailed(
                        f"the episode ended with answer {len(self.play.answers)}, and behind it is a message of the"
                        f" {further[0].get('role')}, {text!r:.80}: what follows it cannot be judged"
                    )
                return told  # a run here would not have gone on either
            results = [text_of(one.get("content")) for one in messages[number + 1 : end] if one.get("role") == "tool"]
            here = [text_of(one.get("content")) for one in told.new if one["role"] == "tool"]
            if results != here and not last:
                raise EpisodeFailed(
                    f"in the replay tools gave {here!r:.200}, and before {results!r:.200}: it is not the same twice"
                )
            if told.answers != len(self.play.answers):
                raise EpisodeFailed("the agent begins another conversation, and the other side has one")
            self.turn = told
        return told

    async def close(self) -> None:
        self._over = True
        await self.play.close()
        await self._end_trial()


class OpenEpisodes:
    """The episodes that clients have open, by names of theirs."""

    def __init__(self, environment: Environment):
        self._environment = environment
        self._judged: dict[str, Judged] = {}

    def add(self, name: str, play: Play, first: Question) -> None:
        """Adds an episode, and forgets those that the environment has closed for their silence."""
        self._judged = {each: one for each, one in self._judged.items() if one.play in self._environment.opened}
        self._judged[name] = Judged(play, first)

    def get(self, name: str) -> Judged | None:
        return self._judged.get(name)

    async def close(self, name: str) -> None:
        """Closes an episode, if it is open."""
        if (judged := self._judged.pop(name, None)) is not None:
            await judged.close()


def told_text(question: Question) -> str:
    """Returns the text of what is new in a question."""
    return "\n".join(text_of(message.get("content")) for message in question.new)
