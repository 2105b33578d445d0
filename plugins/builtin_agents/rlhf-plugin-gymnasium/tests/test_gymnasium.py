"""Real environments: actions in answers, what is shown, how episodes end, and a run."""

import json
import sys
import threading
import time
import types
from itertools import pairwise

import gymnasium
import numpy as np
import pytest
import rlhf_plugin_gymnasium.agent as module
from gymnasium import spaces
from rlhf_authoring import agent_contract, tasks_contract
from rlhf_plugin_gymnasium import Gymnasium, GymnasiumTasks
from rlhf_plugin_gymnasium.text import NoAction, action_of, shown

import rlhf_host
from rlhf_host import Action, Episode, EpisodeFailed, Task, UserError

LAKE = {"id": "FrozenLake-v1", "kwargs": '{"is_slippery": false}', "names": ["left", "down", "right", "up"]}
TestAgent = agent_contract(
    "gymnasium", LAKE, tasks=[Task("go", metadata={"gymnasium": {"seed": 1}})], texts=("right", "down", "hm")
)
TestTasks = tasks_contract("gymnasium", options={"size": 20, "eval_size": 6})


class Echo(gymnasium.Env):
    """Says what it was told, and has a switch for each fault."""

    action_space = spaces.Text(max_length=8, charset="abc")
    observation_space = spaces.Text(max_length=8)

    def __init__(self, fault=None):
        self.fault, self.closed = fault, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"begin {self.np_random.integers(100)}", {}

    def step(self, action):
        if self.fault == "raises":
            raise RuntimeError("the simulator is lost")
        reward = float("nan") if self.fault == "nan" else 0.5
        return action[::-1], reward, action == "c", action == "b", {}

    def close(self):
        self.closed += 1


class Even(gymnasium.Env):
    """Pays for even digits; whatever the quickstart model says is an action."""

    action_space = spaces.Text(min_length=0, max_length=2, charset="0123456789+-=")
    observation_space = spaces.Text(max_length=6)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "14+12=", {}

    def step(self, action):
        return "14+12=", float(sum(letter in "02468" for letter in action)), False, False, {}


sys.modules["echo_world"] = types.ModuleType("echo_world")
gymnasium.register("Echo-v0", Echo, disable_env_checker=True)
gymnasium.register("Even-v0", Even, disable_env_checker=True)


def act(text):
    return Action(text, [1], "stop")


def play(agent, *answers, seed=7, sample=0, task=None):
    """The steps of one episode, closed after."""
    task = task or Task("go", metadata={"gymnasium": {"seed": seed}})
    episode = Episode("e", "g", task, sample=sample)
    steps = [agent.agent_reset(episode)]
    try:
        for answer in answers:
            steps.append(agent.agent_step(episode, act(answer)))
            if steps[-1].done:
                break
        return steps
    finally:
        agent.agent_close(episode)


def made(**options):
    return Gymnasium(Gymnasium.Options(**options))


def test_a_lake_is_crossed():
    first, *steps = play(made(**LAKE), "I go down", "down", "right", "right?", "Right, no: DOWN", "right")
    assert first.observation.startswith("go\n")
    assert "[S]FFF\nFHFH\nFFFH\nHFFG" in first.observation
    assert "SFFF\n[F]HFH" in steps[0].observation
    assert [step.reward for step in steps] == [0, 0, 0, 0, 0, 1]
    assert [step.done for step in steps] == [False] * 5 + [True]
    assert steps[-1].metrics == {
        "gymnasium/turns": 6.0, "gymnasium/invalid": 0.0, "gymnasium/return": 1.0, "gymnasium/truncated": 0.0,
    }  # fmt: skip


def test_what_is_no_action_is_told_and_may_cost():
    _, step, last = play(made(**LAKE, invalid_reward=-0.1, max_turns=2), "north", "nowhere")
    assert step.observation == "This is no action: it should be one of left, down, right, up."
    assert (step.reward, step.done, last.done) == (-0.1, False, True)
    assert last.metrics["gymnasium/return"] == pytest.approx(-0.2)
    assert last.metrics["gymnasium/truncated"] == 1.0
    _, step = play(made(**LAKE, on_invalid="end"), "hm")
    assert (step.done, step.reward, step.metrics["gymnasium/truncated"]) == (True, 0.0, 0.0)
    _, step = play(made(**LAKE, pattern="<a>(.*?)</a>"), "right")
    assert "nothing of the form <a>" in step.observation
    assert "[F]" in play(made(**LAKE, pattern="<a>(.*?)</a>"), "left <a>right</a>")[1].observation


def test_samples_of_a_task_begin_alike_and_tasks_differ():
    agent = made(id="Echo-v0")
    seen = [play(agent, seed=seed, sample=sample)[0].observation for seed in (1, 2, 3) for sample in (0, 1)]
    assert seen[::2] == seen[1::2]
    assert len(set(seen)) > 1


def test_truncated_is_not_terminated():
    agent = made(id="Echo-v0")
    for answer, cut in (("c", 0.0), ("b", 1.0)):
        *_, last = play(agent, "ab", answer)
        assert (last.done, last.reward, last.metrics["gymnasium/truncated"]) == (True, 0.5, cut)
    assert play(agent, "ab")[1].observation == "ba"
    assert play(agent, "xyz")[1].observation == "This is no action: it should have 1 to 8 characters, of abc."
    assert play(made(id="Echo-v0", max_turns=1), "a")[1].metrics["gymnasium/truncated"] == 1.0


def test_an_environment_that_fails_is_no_reward(monkeypatch):
    with pytest.raises(RuntimeError, match="the simulator is lost"):
        play(made(id="Echo-v0", kwargs='{"fault": "raises"}'), "a")
    with pytest.raises(EpisodeFailed, match="gave the reward nan"):
        play(made(id="Echo-v0", kwargs='{"fault": "nan"}'), "a")
    with pytest.raises(EpisodeFailed, match="names no environment"):
        play(made(), "a")
    closed = []
    monkeypatch.setattr(Echo, "close", lambda self: closed.append(self))
    play(made(id="Echo-v0"), "a")
    assert len(closed) == 2, "the one that the options were tried with, and the episode's"


@pytest.mark.parametrize("name", ["Taxi-v4", "Blackjack-v1", "CartPole-v1", "MountainCarContinuous-v0", "CliffWalking-v1"])
def test_environments_of_gymnasium(name):
    task = Task("go", metadata={"gymnasium": {"id": name, "seed": 1}})
    _, *steps = play(made(), "0", "1", task=task)
    assert all(step.observation != "" for step in steps)
    assert not any((step.observation or "").startswith("This is no action") for step in steps)


@pytest.mark.parametrize(
    ("space", "text", "action"),
    [
        (spaces.Discrete(3), "1 or rather 2.", 2),
        (spaces.Discrete(3, start=-1), "-1", -1),
        (spaces.Discrete(3), "3", "from 0 to 2"),
        (spaces.Discrete(3), "9" * 5000, "from 0 to 2"),
        (spaces.Discrete(3), "none", "from 0 to 2"),
        (spaces.Discrete(3), "action: 2.0", 2),
        (spaces.Discrete(3), "1.5", "from 0 to 2"),
        (spaces.Discrete(3), "1e999", "from 0 to 2"),
        (spaces.MultiDiscrete([2, 3]), "[1, 2]", [1, 2]),
        (spaces.MultiDiscrete([2, 3]), "[1, 3]", "lie in"),
        (spaces.MultiDiscrete([2, 3]), "1", "2 numbers, and has 1"),
        (spaces.MultiBinary(2), "0.5 1", "whole numbers"),
        (spaces.Box(-1, 1, (2,)), "force 0.25, -1e-1", [0.25, -0.1]),
        (spaces.Box(-1, 1, (1,)), "2", "lie in"),
        (spaces.Box(-1, 1, (2,)), ".5 -.5", [0.5, -0.5]),
        (spaces.Box(-np.inf, np.inf, (1,)), "1e999", "finite"),
        (spaces.Box(-np.inf, np.inf, (1,)), "1e300", "finite"),
        (spaces.MultiBinary(2), "1e999 1", "finite"),
        (spaces.Dict(a=spaces.Box(-np.inf, np.inf, (1,))), '{"a": [1e999]}', "should be JSON"),
        (spaces.Dict(a=spaces.Discrete(2)), '{"a": 1.0}', {"a": 1}),
        (spaces.Dict(a=spaces.Discrete(2)), '{"a": 0.7}', "should be JSON"),
        (spaces.Box(0, 255, (1,), np.uint8), "7", [7]),
        (spaces.Box(0, 255, (1,), np.uint8), "1e300", "lie in"),
        (spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(0, 1, (1,))), 'so {"a": 1, "b": [0.5]}', {"a": 1, "b": [0.5]}),
        (spaces.Dict(a=spaces.Discrete(2)), "{", "should be JSON"),
        (spaces.Dict(a=spaces.Discrete(2)), "[" * 5000, "should be JSON"),
        (spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3))), "[0, 2]", [0, 2]),
    ],
)
def test_how_an_answer_becomes_an_action(space, text, action):
    if isinstance(action, str):
        with pytest.raises(NoAction, match=action):
            action_of(space, text)
        return
    found = action_of(space, text)
    assert space.contains(found)
    assert (
        json.loads(shown(found)) == pytest.approx(action)
        if not isinstance(action, dict)
        else json.loads(shown(found)) == action
    )


@pytest.mark.parametrize(
    ("names", "text", "action"),
    [
        ("+,-,*,/", "3 + 4", 0),
        ("+,-,*,/", "+ or rather -", 1),
        ("left, down,right ,up", "Down", 1),
        ("left,down,right,up", "upright", None),
        ("left,down,right,up", "r\u0131ght", None),  # which ignoring case finds
        ("left,down,right,up", "up, no r\u0131ght", 3),
    ],
)
def test_names_in_answers(names, text, action):
    agent = made(names=names)
    if action is not None:
        assert action_of(spaces.Discrete(4), text, agent.names) == action
        return
    with pytest.raises(NoAction, match="one of left, down, right, up"):
        action_of(spaces.Discrete(4), text, agent.names)


def test_a_pattern_that_takes_too_long_finds_no_action_and_stops_nobody_else(monkeypatch):
    monkeypatch.setattr(module, "PATTERN_S", 0.3)
    agent, steps, ticks = made(**LAKE, pattern="(a|a)*[bc]"), [], []
    thread = threading.Thread(target=lambda: steps.extend(play(agent, "a" * 40)), daemon=True)
    thread.start()
    while thread.is_alive():
        ticks.append(time.monotonic())
        time.sleep(0.01)
    assert steps[1].observation == "This is no action: it has nothing of the form (a|a)*[bc]."
    assert max(after - before for before, after in pairwise(ticks)) < 0.25
    assert made(pattern="(x)|y")._found("y") == ""


def test_observations_as_text():
    assert shown("as it is") == "as it is"
    assert shown({"a": np.array([0.123456, 1]), "b": (np.int64(2), None)}) == '{"a": [0.1235, 1.0], "b": [2, null]}'


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "FrozenLak-v1"}, "no environment 'FrozenLak-v1'; did you mean FrozenLake-v1"),
        ({"id": "nowhere:X-v0"}, "nowhere:X-v0 cannot be made"),
        ({"id": "FrozenLake-v1", "kwargs": '{"size": 3}'}, "FrozenLake-v1 cannot be made with"),
        ({"kwargs": "{"}, "kwargs is no JSON"),
        ({"kwargs": "[]"}, "kwargs is no JSON object"),
        ({"pattern": "("}, "no regular expression"),
        ({"id": "FrozenLake-v1", "names": "left,right"}, "2 names for 4 actions"),
        ({"names": "left,right,"}, "a name in names is empty"),
        ({"names": "Right,RIGHT"}, "a name stands twice in names: Right, RIGHT"),
        ({"id": "MountainCarContinuous-v0", "names": "a"}, "names are for a discrete space"),
        ({"id": "CartPole-v1", "observation": "render"}, "does not render as text"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UserError, match=message):
        made(**options)


def test_a_run_trains_on_what_the_environment_pays(tmp_path):
    pytest.importorskip("rlhf_plugin_rloo", reason="a whole run needs an algorithm")
    settings = {"rollout.n": 4, "train.batch_size": 2, "train.steps": 2, "train.threads": 1, "rollout.max_new_tokens": 2}
    data = {"sources": [{"path": "gymnasium", "size": 8, "prompt": "12+13="}]}
    agent = {"name": "gymnasium", "id": "Even-v0", "prompt": "{prompt}", "max_turns": 3}
    run = rlhf_host.train(algo="rloo", agent=agent, model="quickstart", data=data, run_dir=str(tmp_path / "run"), **settings)
    assert all(metrics["gymnasium/turns"] == 3 for metrics in run.metrics)
    assert all(0 < metrics["gymnasium/return"] <= 6 for metrics in run.metrics)
    assert all(metrics["gymnasium/invalid"] == 0 for metrics in run.metrics)


@pytest.mark.parametrize("split", ["data", "eval"])
def test_a_run_without_an_environment_is_refused_before_it_samples(tmp_path, split):
    pytest.importorskip("rlhf_plugin_rloo", reason="a whole run needs an algorithm")
    named, unnamed = ({"sources": [{"path": "gymnasium", "size": 8, **more}]} for more in ({"id": "Even-v0"}, {}))
    data = {"data": unnamed} if split == "data" else {"data": named, "eval": {"data": unnamed}}
    setting = {"data": "data", "eval": "eval.data"}[split]
    with pytest.raises(UserError, match=rf"give agent.id=NAME, such as FrozenLake-v1, or {setting}.gymnasium.id=NAME"):
        rlhf_host.train(
            algo="rloo", agent="gymnasium", model="quickstart", run_dir=str(tmp_path / "run"), **data, **{"train.threads": 1}
        )


def test_tasks_name_seeds():
    source = GymnasiumTasks(GymnasiumTasks.Options(size=3, eval_size=2, id="CartPole-v1"))
    train, held_out = source.load_tasks("train", 0), source.load_tasks("eval", 0)
    assert [task.metadata["gymnasium"] for task in train] == [{"id": "CartPole-v1", "seed": seed} for seed in range(3)]
    assert {task.metadata["gymnasium"]["seed"] for task in held_out}.isdisjoint(range(3))
    assert module.Gymnasium is Gymnasium
