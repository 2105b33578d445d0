"""The plugin: finds the answer, compares plain ones here and sends the others to worker processes."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rlhf_host import Outcome, Reward, ScoreContext, Task, Trajectory, Unjudged, hookimpl
from rlhf_plugin_math_verifier.candidates import Form, find
from rlhf_plugin_math_verifier.characters import fold
from rlhf_plugin_math_verifier.claims import NONE, Claim
from rlhf_plugin_math_verifier.judging import NeedsAlgebra, NoAlgebra, judge
from rlhf_plugin_math_verifier.labels import read_label
from rlhf_plugin_math_verifier.pool import Pool, Verdict
from rlhf_plugin_math_verifier.reading import MAX_CHARS
from rlhf_plugin_math_verifier.thoughts import MARKERS, Thoughts

_NO_ALGEBRA = NoAlgebra()
_TAIL_TOKENS = 16
"""Number of tokens before an answer that are examined: enough for the marker that opens thoughts."""
_TAILS = 10_000
"""Maximum number of remembered tails."""

_PLAIN_CHARS = 300
"""Maximum length of an answer that is compared here."""
_INTEGER = re.compile(r"-?[0-9]{1,15}")
"""Pattern of an integer, the answer of most arithmetic tasks, which is compared directly."""


class _Later(NamedTuple):
    """An answer that only a worker can judge."""

    label: str
    claim: Claim
    marked: bool


class MathVerifierOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    answer: Form = Field(
        "any",
        description=r"where the answer may be: boxed (\boxed{} only), hashes (after #### only), or any: "
        r"<answer>, else \boxed{}, else ####, else 'answer is', else the last number or LaTeX expression",
    )
    thoughts: list[str] | None = Field(
        None,
        description="pairs of markers around thoughts, which are not judged, such as '<plan> </plan>', with commas between pairs;"
        " default: those of known models; an empty list: thoughts are judged too",
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
    timeout_s: float = Field(
        5.0, gt=0, description="most processor time to verify one answer, in seconds; a longer one is wrong"
    )
    wait_s: float = Field(120.0, gt=0, description="longest wait for a worker process, in seconds: then an answer is unjudged")
    workers: int = Field(4, ge=1, description="largest number of worker processes; they are started when needed")
    memory_mb: int = Field(1024, ge=256, description="memory limit of a worker process, in MiB (if the system supports it)")

    @field_validator("thoughts", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        pairs = [each for each in value.split(",") if each.strip()] if isinstance(value, str) else value
        for each in pairs if isinstance(pairs, list) else ():
            if len(str(each).split()) != 2:
                raise ValueError(
                    f"{each!r} is no pair of markers: write the one that opens thoughts, a blank, and the one that closes them"
                )
        return pairs

    @model_validator(mode="after")
    def _order(self) -> MathVerifierOptions:
        if self.incorrect + self.format_credit > self.correct:
            raise ValueError(
                f"incorrect + format_credit is {self.incorrect + self.format_credit:g}, more than correct ({self.correct:g}): "
                "a wrong answer would earn more than a right one"
            )
        return self


class MathVerifier:
    """Compares the answer in the last action's text with the label: reward and 0-1 score. ``Unjudged`` if nothing can be
    compared with the label.
    """

    Options = MathVerifierOptions

    def __init__(self, options: MathVerifierOptions):
        self.options = options
        self._pool: Pool | None = None
        self._thoughts = Thoughts(MARKERS if options.thoughts is None else [_pair(each) for each in options.thoughts])
        self._opened: dict[tuple[int, ...], bool] = {}
        """Tokens → True if thoughts are open after them."""

    @hookimpl
    def check_labels(self, tasks: Sequence[Task]) -> dict[int, str]:
        labels = ("the task has no label" if task.ground_truth is None else read_label(task.ground_truth) for task in tasks)
        told = ((place, label.reason if isinstance(label, Unjudged) else label) for place, label in enumerate(labels))
        return {place: problem for place, problem in told if isinstance(problem, str)}

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
        """Returns the reward if plain comparison decides it."""
        truth, said = trajectory.task.ground_truth, trajectory.last_text
        opened = self._thoughts_open_before(trajectory)
        plain = self.options.answer == "any" and not opened
        if plain and isinstance(truth, str) and _INTEGER.fullmatch(truth) and _INTEGER.fullmatch(said):
            return self._reward(int(truth) == int(said), timeout=False, marked=False)
        label = read_label(truth)
        if isinstance(label, Unjudged):
            return label
        text = None if opened and not self._thoughts.closes(said) else self._thoughts.after(said)
        folded = fold(text[-self.options.max_chars :]) if text else ""
        found = find(folded, self.options.answer, prose=label.prose, parts=label.parts) if text else None
        claim = found.claim if found and len(found.claim.text) <= MAX_CHARS else NONE
        marked = found is not None and found.marked
        if len(claim.text) > _PLAIN_CHARS:  # its comparison would keep other work of the event loop waiting
            return _Later(label.text, claim, marked)
        try:
            verdict = judge(label.text, claim, self.options.decimals, _NO_ALGEBRA)
        except NeedsAlgebra:
            return _Later(label.text, claim, marked)
        return self._verdict(verdict, claim.text, marked)

    def _thoughts_open_before(self, trajectory: Trajectory) -> bool:
        """Returns True if a chat template opens the thoughts, right before the answer."""
        before: Sequence[int] = ()
        answer = trajectory.actions[-1:]
        for segment in trajectory.segments:
            if answer and segment is answer[0]:
                break
            before = segment.token_ids or before
        tail = tuple(before[-_TAIL_TOKENS:])
        if tail not in self._opened:
            if len(self._opened) >= _TAILS:
                self._opened.clear()
            self._opened[tail] = bool(tail and trajectory.decode and self._thoughts.opened_by(trajectory.decode(before)))
        return self._opened[tail]

    def _verdict(self, verdict: Verdict, content: str, marked: bool) -> Reward | Unjudged:
        if verdict == "label":
            return Unjudged("the label cannot be read as mathematics, or not in time")
        if verdict == "failed":
            return Unjudged("no worker process could judge the answer")
        if verdict == "unjudged":
            return Unjudged(f"the answer {content[:80]!r} may be the label or not: its words or its form leave it open")
        return self._reward(verdict == "right", timeout=verdict == "timeout", marked=marked)

    async def _in_worker(self, later: _Later) -> Reward | Unjudged:
        submitted = self._workers().submit(later.label, later.claim, self.options.decimals)
        judged: asyncio.Future[Verdict] = asyncio.wrap_future(submitted)
        verdict = await asyncio.shield(judged)  # others may wait for it too
        return self._verdict(verdict, later.claim.text, later.marked)

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


def _pair(markers: str) -> tuple[str, str]:
    opening, closing = markers.split()
    return opening, closing
