"""The plugin: finds the answer, compares plain ones here and sends the others to worker processes."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rlhf_host import Outcome, Reward, ScoreContext, Trajectory, Unjudged, hookimpl
from rlhf_plugin_math_verifier.extraction import Answer, Form, extract
from rlhf_plugin_math_verifier.labels import Label, read_label
from rlhf_plugin_math_verifier.plain import number, same, tidy, words
from rlhf_plugin_math_verifier.pool import Pool, Verdict

MAX_ANSWER_CHARS = 2000
"""A longer answer is wrong: no label is as long."""


_INTEGER = re.compile(r"-?[0-9]{1,15}")
"""What most tasks of arithmetic answer: compared without further ado."""


class _Later(NamedTuple):
    """What only a worker can judge."""

    label: str
    content: str
    marked: bool


class MathVerifierOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    answer: Form = Field(
        "any",
        description=r"where the answer may be: boxed (\boxed{} only), hashes (after #### only), or any: "
        r"\boxed{}, else ####, else 'answer is', else the last number or LaTeX expression",
    )
    correct: float = Field(1.0, description="reward of a right answer")
    incorrect: float = Field(0.0, description="reward if the answer is wrong, missing, or cannot be verified in time")
    format_credit: float = Field(
        0.0,
        ge=0,
        description="added to `incorrect` if a wrong answer is marked as the answer, in a form that `answer` allows",
    )
    decimals: int = Field(6, ge=0, le=15, description="number of decimal places that must agree")
    max_chars: int = Field(20_000, ge=1, description="only this many characters at the end of a text are read")
    timeout_s: float = Field(5.0, gt=0, description="longest time to verify one answer in a worker process")
    wait_s: float = Field(
        120.0,
        gt=0,
        description="longest wait for a free worker process: then an answer is unjudged, or wrong if it had a first try",
    )
    workers: int = Field(4, ge=1, description="largest number of worker processes; they are started when needed")
    memory_mb: int = Field(1024, ge=256, description="memory limit of a worker process, in MiB (if the system supports it)")

    @model_validator(mode="after")
    def _order(self) -> MathVerifierOptions:
        if self.incorrect + self.format_credit > self.correct:
            raise ValueError(
                f"incorrect + format_credit is {self.incorrect + self.format_credit:g}, more than correct ({self.correct:g}): "
                "a wrong answer would earn more than a right one"
            )
        return self


class MathVerifier:
    """Compares the answer in the last action's text with the label: reward and 0-1 score. ``Unjudged`` where the label cannot be
    judged against."""

    Options = MathVerifierOptions

    def __init__(self, options: MathVerifierOptions):
        self.options = options
        self._pool: Pool | None = None

    @hookimpl
    async def score(self, trajectories: Sequence[Trajectory], context: ScoreContext) -> list[Reward | Unjudged]:
        found = [self._at_once(trajectory) for trajectory in trajectories]
        pending = [index for index, verdict in enumerate(found) if isinstance(verdict, _Later)]
        judged = await asyncio.gather(*(self._in_worker(found[index]) for index in pending))  # type: ignore[arg-type]
        rewards = dict(zip(pending, judged, strict=True))
        return [rewards[index] if isinstance(verdict, _Later) else verdict for index, verdict in enumerate(found)]

    @hookimpl
    def run_finished(self, outcome: Outcome) -> None:
        if self._pool:
            self._pool.close()
            self._pool = None

    def _at_once(self, trajectory: Trajectory) -> Reward | _Later | Unjudged:
        """The reward where plain comparison decides it."""
        truth, said = trajectory.task.ground_truth, trajectory.last_text
        if self.options.answer == "any" and isinstance(truth, str) and _INTEGER.fullmatch(truth) and _INTEGER.fullmatch(said):
            return self._reward(int(truth) == int(said), timeout=False, marked=False)
        label = read_label(truth)
        if isinstance(label, Unjudged):
            return label
        text = said[-self.options.max_chars :]
        answer = extract(text, self.options.answer, prose=label.words is not None)
        verdict: Verdict | None = self._decide(label, answer)
        marked = answer is not None and answer.marked
        if verdict is None:
            return _Later(label.text, answer.text if answer and len(answer.text) <= MAX_ANSWER_CHARS else "", marked)
        return self._reward(verdict == "right", timeout=False, marked=marked)

    async def _in_worker(self, later: _Later) -> Reward | Unjudged:
        submitted = self._workers().submit(later.label, later.content, self.options.decimals)
        judged: asyncio.Future[Verdict] = asyncio.wrap_future(submitted)
        verdict = await asyncio.shield(judged)  # others may wait for it too
        if verdict == "label":
            return Unjudged("the label cannot be read as mathematics, or not in time")
        if verdict == "failed":
            return Unjudged("no worker process could judge the answer")
        return self._reward(verdict == "right", timeout=verdict == "timeout", marked=later.marked)

    def _decide(self, label: Label, answer: Answer | None) -> Verdict | None:
        """The verdict where both are plain, or the label is and there is no answer; ``None`` leaves it to a worker."""
        if label.words is not None:
            return "right" if answer and (words(answer.text) == label.words or tidy(answer.text) == label.text) else "wrong"
        if label.number is None:  # even without an answer: the worker finds labels that cannot be parsed
            return None
        if answer is None or len(answer.text) > MAX_ANSWER_CHARS or words(answer.text) is not None:
            return "wrong"
        value = number(answer.text)
        return None if value is None else "right" if same(label.number, value, self.options.decimals) else "wrong"

    def _reward(self, right: bool, *, timeout: bool, marked: bool) -> Reward:
        credit = self.options.format_credit if marked and not timeout else 0.0
        return Reward(
            value=self.options.correct if right else self.options.incorrect + credit,
            score=float(right),
            metrics={"math_verifier/formatted": float(marked), "math_verifier/timeout": float(timeout)},
        )

    def _workers(self) -> Pool:
        if self._pool is None or self._pool.pid != os.getpid():  # a fork has the object but not its threads
            options = self.options
            self._pool = Pool(options.workers, options.timeout_s, options.memory_mb, options.wait_s)
        return self._pool
