"""Whole conversations judged at their end: played again into an episode of their own, and compared with what it showed.

Some projects run tools one by one and send everything at the end. Tools are then run by a trial: the same episode with the same
seed, which gets each call as an answer. What counts is the replay of the whole answers, with the calls that each really had. A
tool whose result is another one in the replay is an error: the environment is not the same twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_environments.playing import Play, Result
from rlhf_environments.policy import Answer, Question
from rlhf_environments.serving import text_of
from rlhf_host import EpisodeFailed

OVER = "The episode is over: no more calls are run."


class Judged:
    """An episode whose answers come in parts: calls of tools at once, whole messages later."""

    def __init__(self, play: Play, first: Question):
        self.play, self.turn = play, first
        self._trial: Play | None = None
        self._calls = itertools.count()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Runs a tool in the trial; returns its result. Raises ``EpisodeFailed`` where the episode fails."""
        if self._trial is None:
            self._trial, _ = await self.play.environment.again(self.play)
            for answer in self.play.answers:
                await self._trial.answer(answer)
        if self._trial.over:
            return OVER
        function = {"name": name, "arguments": dict(arguments)}
        told = await self._trial.answer(Answer(tool_calls=[{"id": f"trial-{next(self._calls)}", "function": function}]))
        if isinstance(told, Result):
            return OVER
        return "\n".join(text_of(one.get("content")) for one in told.new if one["role"] == "tool") or told_text(told)

    async def replay(self, messages: Sequence[Mapping[str, Any]], truncated: bool = False) -> Question | Result:
        """Plays assistant's messages, each with the results of its calls behind it, and returns what comes of the last one.

        Args:
            messages: those since the last replay, in the form of OpenAI's chat completions.
            truncated: the last answer was cut at its limit.

        Raises:
            EpisodeFailed: the episode failed, or a tool had another result than before.
        """
        if self._trial is not None:
            await self._trial.close()
            self._trial = None
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
        for play in (self.play, self._trial):
            if play is not None:
                await play.close()


def told_text(question: Question) -> str:
    """Returns the text of what is new in a question."""
    return "\n".join(text_of(message.get("content")) for message in question.new)
