"""The reward ``llm_judge``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

import regex
from pydantic import Field

from rlhf_host import Reward, ScoreContext, Task, Trajectory, Unjudged, UserError, hookimpl
from rlhf_plugin_llm_judge.base import Judged
from rlhf_plugin_llm_judge.judge import Unreadable
from rlhf_plugin_llm_judge.options import ChatOptions
from rlhf_plugin_llm_judge.texts import FIELDS, RUBRIC, conversation, fenced, filled, read_rubric
from rlhf_plugin_llm_judge.verdict import SCORE, number_in

NO_LABEL = "the rubric has {label}, and the task has none"


class LLMJudge(Judged):
    """A model behind OpenAI's API gives a number by a rubric; it becomes a reward in [0, 1]."""

    name = "llm_judge"
    corrects = False

    class Options(ChatOptions):
        rubric: str | None = Field(
            None, description="a text file with {prompt} {answer} {label} {low} {high}; default: how right, helpful and clear"
        )
        pattern: str = Field(
            "score",
            description="where the number is (the last one counts): score, after that word; json, 'score' of the last JSON object"
            " (not of what is in it);"
            " or a regular expression",
        )
        low: float = Field(0.0, description="the worst number: reward 0")
        high: float = Field(10.0, description="the best number: reward 1")
        answer: Literal["last", "all"] = Field("last", description="what is judged: the last turn, or all after the prompt")

    def __init__(self, options: Options):
        Judged.__init__(self, options)
        self.options = options
        if options.low >= options.high:
            raise UserError(f"llm_judge: low {options.low:g} is not below high {options.high:g}")
        self.rubric = RUBRIC if options.rubric is None else read_rubric(self.name, options.rubric)
        if "{answer}" not in self.rubric:
            raise UserError(f"llm_judge: the rubric {options.rubric} has no {{answer}}; it may have {{{'} {'.join(FIELDS)}}}")
        try:
            written = SCORE if options.pattern == "score" else options.pattern
            self.pattern = None if options.pattern == "json" else regex.compile(written)
        except regex.error as error:
            raise UserError(f"llm_judge: pattern is no regular expression: {error}") from error

    @hookimpl
    def check_labels(self, tasks: Sequence[Task]) -> dict[int, str]:
        return {place: NO_LABEL for place, task in enumerate(tasks) if self._lacks_label(task)}

    @hookimpl
    async def score(self, trajectories: Sequence[Trajectory], context: ScoreContext) -> list[Reward | Unjudged]:
        return list(await asyncio.gather(*map(self._judge, trajectories)))

    async def _judge(self, trajectory: Trajectory) -> Reward | Unjudged:
        if self._lacks_label(trajectory.task):
            return Unjudged(NO_LABEL)
        number = await self.judge.ask(self.asked(trajectory), self._number)
        if isinstance(number, Unjudged):
            return number
        value = (number - self.options.low) / (self.options.high - self.options.low)
        return Reward(value, score=value, metrics={"llm_judge/raw": number})

    def _number(self, said: str, cut: bool) -> float:
        if (number := number_in(said, self.pattern, cut=cut)) is None:
            why = "'s answer was cut by max_tokens, before a number" if cut else " said no number"
            raise Unreadable(f"{why}: {said[-200:]!r}")
        low, high = self.options.low, self.options.high
        if not low <= number <= high:
            raise Unreadable(f" said {number:g}, which is not from {low:g} to {high:g}", again=False)
        return number

    def _lacks_label(self, task: Task) -> bool:
        return "{label}" in self.rubric and self.options.rubric is not None and task.ground_truth is None

    def asked(self, trajectory: Trajectory) -> str:
        """Returns the text that the judge reads."""
        answer = trajectory.last_text if self.options.answer == "last" else trajectory.full_text
        label = trajectory.task.ground_truth
        return filled(
            self.rubric,
            {
                "prompt": conversation(trajectory.task),
                "answer": fenced(answer),
                "label": "(none)" if label is None else str(label),
                "low": f"{self.options.low:g}",
                "high": f"{self.options.high:g}",
            },
        )
