"""Functions as rewards: what they are called with, by their signatures, and what they may return."""

import asyncio
import functools

import pytest

from rlhf_host import Reward, ScoreContext, Segment, Task, Trajectory, Unjudged
from rlhf_host.errors import PluginError
from rlhf_host.plugins.reward_functions import FunctionReward

CONTEXT = ScoreContext("eval", 3)


def answer(text: str = "42") -> Trajectory:
    segments = [Segment("prompt", [63]), Segment("action", [ord(char) for char in text])]
    task = Task("six by seven?", ground_truth="42", metadata={"level": 2})
    return Trajectory("e", "g", task, segments, decode=lambda ids: "".join(map(chr, ids)))


def score(function, *trajectories):
    found = FunctionReward(function, "f").score(trajectories or [answer()], CONTEXT)
    return asyncio.run(found) if asyncio.iscoroutine(found) else found


class Judge:
    def __call__(self, text, label):
        return float(text == label)

    def judge(self, trajectory):
        return trajectory.task.metadata["level"]


@pytest.mark.parametrize(
    ("function", "reward"),
    [
        (lambda text, label: float(text == label), 1.0),
        (lambda label, text: float((text, label) == ("42", "42")), 1.0),
        (lambda text: len(text), 2),
        (lambda trajectory: trajectory.task.metadata["level"], 2),
        (lambda anything: anything.task.metadata["level"], 2),
        (lambda answer, truth: float(answer == truth), 1.0),
        (lambda text, other: float(text == other), 1.0),
        (lambda task, prompt: len(prompt) + task.metadata["level"], 15),
        (lambda context, text: context.step, 3),
        (lambda text, label, strict=False: 0.5 if strict is False else 0.0, 0.5),
        (lambda text="", label="": float(text == label), 1.0),
        (lambda text, *, label: float(text == label), 1.0),
        (lambda text, /, label: float(text == label), 1.0),
        (functools.partial(lambda weight, text: weight * len(text), 0.25), 0.5),
        (functools.partial(lambda text, weight: weight * len(text), weight=0.25), 0.5),
        (Judge(), 1.0),
        (Judge().judge, 2),
    ],
)
def test_parameters_say_what_is_wanted(function, reward):
    assert score(function) == [reward]


@pytest.mark.parametrize(
    "function", [lambda: 1.0, lambda a, b, c: 1.0, lambda *texts: 1.0, lambda a, *, b: 1.0, lambda a=1: 1.0, min]
)
def test_parameters_that_say_nothing_are_refused(function):
    with pytest.raises(PluginError, match=r"reward 'f'.*(a reward function takes \(text, label\)|wrap it in def f)"):
        FunctionReward(function, "f")


@pytest.mark.parametrize(
    "function",
    [lambda prompt, response: 1.0, lambda answer, text: 1.0, lambda prompt, text, expected: 1.0, lambda text, /: 1.0],
)
def test_a_known_name_is_never_given_something_else(function):
    with pytest.raises(PluginError, match=r"takes \(.*\): a reward function takes \(text, label\), \(trajectory\), or any of"):
        FunctionReward(function, "f")


def test_true_and_false_are_scores_too():
    right, wrong = score(lambda text, label: text == label, answer("42"), answer("41"))
    assert (right, wrong) == (Reward(1.0, score=1.0), Reward(0.0, score=0.0))


@pytest.mark.parametrize(
    ("function", "reward"),
    [
        (lambda text, label: float(text == label), Unjudged("the task has no label")),
        (lambda answer, truth: float(answer == truth), Unjudged("the task has no label")),
        (lambda text, *, label: float(text == label), Unjudged("the task has no label")),
        (lambda text, label=None: 1.0 if label is None else 0.0, 1.0),
        (lambda text, label="42": float(text == label), 1.0),
        (lambda text: 0.5, 0.5),
        (lambda task: float(task.ground_truth is None), 1.0),
    ],
)
def test_a_task_without_label_is_judged_by_functions_that_need_none(function, reward):
    row = answer("42")
    row.task = Task("six by seven?")
    assert score(function, row) == [reward]


def test_what_a_function_may_return():
    import numpy as np
    import torch

    given = [None, 1, 0.5, Reward(2.0, metrics={"x": 1.0}), np.float32(0.25), torch.tensor(0.75), np.bool_(True)]
    found = score(lambda trajectory: given[trajectory.sample], *(answer_number(i) for i in range(len(given))))
    assert found == [None, 1, 0.5, Reward(2.0, metrics={"x": 1.0}), 0.25, 0.75, Reward(1.0, score=1.0)]


def answer_number(sample):
    made = answer()
    made.sample = sample
    return made


def test_async_functions_wait_side_by_side():
    waiting = []

    async def judge(text, label):
        waiting.append(text)
        while len(waiting) < 3:  # would never end one by one
            await asyncio.sleep(0)
        return text == label

    found = score(judge, answer("42"), answer("41"), answer("40"))
    assert [reward.value for reward in found] == [1.0, 0.0, 0.0]


def test_an_answer_for_which_it_raises_is_not_judged():
    judged, raised = score(lambda text, label: 1 / len(text), answer("a"), answer(""))
    assert judged == 1.0
    assert isinstance(raised, Unjudged)
    assert raised.reason.startswith("ZeroDivisionError: division by zero (tests/plugins/test_python_objects.py:")
