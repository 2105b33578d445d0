"""Packages call reward functions of other projects: entry points in ``rlhf.reward_forms``, asked for functions with parameters that
the host knows no value for."""

from __future__ import annotations

import asyncio

import pytest

from rlhf_host import Reward, ScoreContext, Segment, Task, Trajectory, Unjudged
from rlhf_host.errors import PluginError, RunError
from rlhf_host.plugins.reward_functions import FunctionReward

KNOWS = """
from rlhf_host import Reward, Unjudged
print("imported")

class Form:
    def __init__(self, function):
        self.function = function

    def lack(self, task):
        return "no place" if "place" not in task.metadata else None

    def score(self, trajectories, context):
        return [Reward(self.function(len(row.segments)), metrics={"entropy": 2.0}) for row in trajectories]

class Later(Form):
    async def score(self, trajectories, context):
        return [Unjudged("later"), *super().score(trajectories, context)]

def form(function):
    '''``(zz)`` of Zet, called with a number. More.'''
    return {"zz": Form, "zzz": Later}.get(function.__code__.co_varnames[0], lambda function: None)(function)
"""
CONTEXT = ScoreContext("train", 7)
ROWS = [Trajectory("e", "g", Task("1+2=", "3"), [Segment("prompt", [1]), Segment("action", [2])], decode=lambda ids: "3")]
REWARD = Reward(4.0, metrics={"reward/f/entropy": 2.0})


def install(here, source=KNOWS):
    here.install("cmd-knows", {"rlhf.reward_forms": "zet = cmd_knows:form"}, {"cmd_knows.py": source})


def test_a_package_calls_the_functions_that_it_knows(here):
    install(here)
    reward = FunctionReward(lambda zz: 2.0 * zz, "f")
    assert reward.score(ROWS, CONTEXT) == [REWARD]
    assert reward.check_labels([Task("1+2=", "3"), Task("1+2=", None, {"place": 1})]) == {0: "no place"}
    assert asyncio.run(FunctionReward(lambda zzz: 2.0 * zzz, "f").score(ROWS, CONTEXT)) == [Unjudged("later"), REWARD]


def test_it_is_asked_for_parameters_that_the_host_does_not_know_alone(here, capsys):
    install(here)
    assert FunctionReward(lambda text, label: text == label, "f").score(ROWS, CONTEXT) == [Reward(1.0, score=1.0)]
    assert capsys.readouterr().out == ""
    assert FunctionReward(lambda answer, truth: answer == truth, "f").score(ROWS, CONTEXT) == [Reward(1.0, score=1.0)]
    assert capsys.readouterr().out == "imported\n"


def test_what_fits_no_form_is_told_the_forms_of_packages(here):
    install(here)
    with pytest.raises(
        PluginError, match=r"takes \(a, b, c\).*; or it is one of another project's: `\(zz\)` of Zet, called with a"
    ):
        FunctionReward(lambda a, b, c: 1.0, "f")


def test_a_package_that_fails_is_named(here):
    install(here, "def form(function):\n    raise ValueError('broken')\n")
    with pytest.raises(RunError, match=r"'zet' from cmd-knows .* failed in its call: ValueError: broken"):
        FunctionReward(lambda zz: 1.0, "f")


@pytest.mark.parametrize(
    "function",
    [
        lambda prompts, completions: 1.0,
        lambda completions, **columns: 1.0,
        lambda solution_str, ground_truth: 1.0,
        lambda queries, prompts, labels: 1.0,
    ],
)
def test_where_no_package_knows_it_no_text_and_label_are_meant(function, monkeypatch):
    monkeypatch.setenv("RLHF_DISABLE_PLUGINS", "rlhf-translate:translate")
    told = "as functions for other projects do; they are called after pip install -c dist/wheels.txt rlhf-translate"
    with pytest.raises(PluginError, match=told):
        FunctionReward(function, "f")
    with pytest.raises(PluginError, match="by name; functions for other projects are called after pip install"):
        FunctionReward(lambda a, b, c: 1.0, "f")
