"""Another try after a wrong answer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import Action, Episode, EpisodeFailed, Needs, Step, Task, UserError, hookimpl
from rlhf_plugin_multi_turn.files import functions_of
from rlhf_plugin_multi_turn.threads import in_thread

_MARKED = re.compile(r"(?:####|\\boxed\{)\s*([^}\n]*)")
NO_LABEL = "the task has no label to compare an answer with"
_NUMBER = re.compile(r"(?:(?<!\d)-)?\d[\d,]*(?:\.\d+)?")


class Retry:
    """A wrong answer gets feedback and another try. The reward is 1 for a right answer, less ``penalty`` for each try before."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        max_turns: int = Field(2, ge=1, description="tries per episode")
        feedback: str = Field(
            "That is not right. Try again.",
            description="what the policy is told after a wrong answer; {prompt} is the task's prompt, {answer} what it said",
        )
        penalty: float = Field(0.0, ge=0, le=1, description="taken off the reward for each try before the right one")
        check: str | None = Field(
            None,
            description="FILE.py:NAME, a function (text, label) that says whether an answer is right; default: the last number, or "
            "the whole text, equals the label",
        )

    def __init__(self, options: Options):
        self.options = options
        self.check: Callable[[str, Any], Any] = right
        if options.check is not None:
            chosen = functions_of(options.check, "agent.check")
            if len(chosen) != 1:
                raise UserError(f"agent.check {options.check}: give one function, FILE.py:NAME; it has {', '.join(chosen)}")
            [self.check] = chosen.values()
        self.quick = self.check is right or inspect.iscoroutinefunction(self.check)

    @hookimpl
    def needs(self) -> Needs:
        return Needs(rewards=False)

    @hookimpl
    def check_labels(self, tasks: Sequence[Task]) -> dict[int, str]:
        return {place: NO_LABEL for place, task in enumerate(tasks) if task.ground_truth is None}

    @hookimpl
    async def agent_reset(self, episode: Episode) -> Step:
        if episode.task.ground_truth is None:
            raise EpisodeFailed(NO_LABEL)
        episode.state = {"tries": 0}
        return Step()

    @hookimpl
    async def agent_step(self, episode: Episode, action: Action) -> Step:
        state = episode.state
        state["tries"] += 1
        asked = action.text, episode.task.ground_truth
        verdict = self.check(*asked) if self.quick else await in_thread(self.check, *asked)
        verdict = await verdict if inspect.isawaitable(verdict) else verdict
        if verdict is None:
            raise EpisodeFailed("the check could not judge the answer")
        good = bool(verdict)
        first = state["tries"] == 1
        if first:
            state["first"] = good
        if good or state["tries"] == self.options.max_turns:
            reward = max(0.0, 1.0 - self.options.penalty * (state["tries"] - 1)) if good else 0.0
            metrics = {"retry/tries": float(state["tries"]), "retry/first": float(state["first"])}
            if not state["first"]:
                metrics["retry/later"] = float(good)  # of those whose first answer was wrong
            return Step(reward=reward, score=float(good), done=True, metrics=metrics)
        prompt = _words(episode.task.prompt if isinstance(episode.task.prompt, str) else episode.task.prompt[-1]["content"])
        return Step(self.options.feedback.replace("{prompt}", prompt).replace("{answer}", action.text))


def right(text: str, label: Any) -> bool:
    r"""Returns True if the text is the label, or its last number is the label's: the one after ``####``, in ``\boxed{}``, or the
    only one.
    """
    wanted = str(label).strip()
    if text.strip() == wanted:
        return True
    marked = _MARKED.findall(wanted)
    numbers, said = _NUMBER.findall(marked[-1] if marked else wanted), _NUMBER.findall(text)
    return len(numbers) == 1 and bool(said) and _value(said[-1]) == _value(numbers[0])


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def _words(content: Any) -> str:
    """Returns the words of a content, which may have parts that are pictures."""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)
