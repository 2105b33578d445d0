"""Games on a server: what the policy sees, what its answers become, and how servers fail."""

import asyncio
import time

import pytest
import regex
from rlhf_plugin_openenv import OpenEnv, actions
from rlhf_plugin_openenv.actions import action_of, form_of
from rlhf_plugin_openenv.sessions import Refused

import rlhf_host
from rlhf_host import Action, Episode, RunError, Task, UserError

from .servers import Server

SUMS = [{"prompt": "12+34=", "label": "46"}, {"prompt": "5+6=", "label": "11"}]


def act(text):
    return Action(text, [1], "stop")


def made(*servers, **options):
    return OpenEnv(OpenEnv.Options(url=[server.url for server in servers], **{"action": '{"number": "{int}"}', **options}))


async def game(agent, answers, sample=0):
    """The steps of one episode."""
    episode = Episode(f"e{sample}", "g", Task("guess", metadata={"level": 3}), sample=sample, seed=5)
    steps = [await agent.agent_reset(episode)]
    try:
        for answer in answers:
            steps.append(await agent.agent_step(episode, act(answer)))
            if steps[-1].done:
                break
        return steps
    finally:
        await agent.agent_close(episode)


def play(agent, answers):
    async def run():
        try:
            return await game(agent, answers)
        finally:
            await agent.run_finished(None)

    return asyncio.run(run())


def test_a_game_ends_with_its_reward_and_leaves_no_session():
    with Server() as server:
        agent = made(server, reset=["level"])
        first, *steps = play(agent, [f"I say {number}" for number in range(10)])
        assert first.observation == "guess\n0-9?"
        assert [step.observation for step in steps[:-1]] == ["higher"] * (len(steps) - 1)
        assert (steps[-1].done, steps[-1].reward, steps[-1].metrics["openenv/unfinished"]) == (True, 1.0, 0.0)
        assert server.resets == [{"seed": 5, "level": 3}]
        until = time.monotonic() + 5
        while server.open and time.monotonic() < until:
            time.sleep(0.01)
        assert server.open == 0


def test_an_answer_that_is_no_action_is_told():
    with Server() as server:
        _, step = play(made(server), ["hm"])
        assert (step.observation, step.done) == ("This is no valid action: it has no number", False)
        _, step = play(made(server, action="json"), ['{"number": "x"}'])
        assert step.observation == "This is no valid action: number: Input should be a valid integer"
        _, step = play(made(server, on_invalid="end"), ["hm"])
        assert (step.done, step.reward) == (True, 0.0)


def test_turns_have_an_end():
    with Server() as server:
        *_, last = play(made(server, max_turns=2), ["-1", "-1", "-1"])
        assert (last.done, last.reward, last.metrics["openenv/turns"], last.metrics["openenv/unfinished"]) == (True, 0.0, 2, 1)


@pytest.mark.parametrize(
    ("fault", "message", "retryable"),
    [
        ("dies", "closed the session at step", True),
        ("silent", r"did not answer step in 0\.3 s", True),
        ("garbage", r"answered step with \[1, 2\]", False),
        ("breaks", "EXECUTION_ERROR: the game broke", False),
    ],
)
def test_a_server_that_fails_is_no_reward(fault, message, retryable):
    with Server(fault) as server, pytest.raises(rlhf_host.EpisodeFailed, match=message) as failed:
        play(made(server, timeout_s=0.3), ["1"])
    assert failed.value.retryable is retryable


def test_sessions_wait_for_room_and_spread_over_servers():
    with Server(room=2) as one, Server(room=2) as two:
        agent = made(one, two, at_once=2)

        async def run():
            try:
                return await asyncio.gather(*(game(agent, list("0123456789"), sample) for sample in range(12)))
            finally:
                await agent.run_finished(None)

        games = asyncio.run(run())
        assert all(steps[-1].reward == 1.0 for steps in games)
        assert (one.most, two.most) == (2, 2)
        assert one.sessions + two.sessions == 12


def test_a_server_that_others_fill_is_asked_again_until_it_is_too_late():
    with Server(room=1) as server:
        patient = made(server, at_once=2)

        async def run(agent):
            try:
                return await asyncio.gather(*(game(agent, list("0123456789"), sample) for sample in range(3)))
            finally:
                await agent.run_finished(None)

        assert len(asyncio.run(run(patient))) == 3
    with Server(room=0) as server, pytest.raises(rlhf_host.EpisodeFailed, match=r"was full for 0\.5 s"):
        play(made(server, wait_s=0.5), ["1"])


@pytest.mark.parametrize(
    ("option", "schema", "form"),
    [
        (
            "auto",
            {"properties": {"message": {"type": "string"}, "metadata": {}}, "required": ["message"]},
            {"message": "{text}"},
        ),
        ("auto", {"properties": {"number": {"type": "integer"}}}, {"number": "{int}"}),
        ("auto", {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}, "required": ["a", "b"]}, None),
        ("json", {}, None),
        ('{"tool": {"say": "{text}"}}', {}, {"tool": {"say": "{text}"}}),
    ],
)
def test_how_an_answer_becomes_an_action(option, schema, form):
    assert form_of(option, schema) == form


def test_actions_in_answers():

    assert action_of({"tool": {"say": ["{text}"]}}, "I think <a>x</a> or <a>y</a>", regex.compile("<a>(.*?)</a>")) == {
        "tool": {"say": ["y"]}
    }
    assert action_of(None, 'first {"a": 1} then {"b": {"c": 2}} end', None) == {"b": {"c": 2}}
    for form, text, pattern in ((None, "no JSON {", None), ({"x": "{text}"}, "nothing", regex.compile("<a>"))):
        with pytest.raises(Refused):
            action_of(form, text, pattern)


def test_a_pattern_that_takes_too_long_finds_no_action(monkeypatch):
    monkeypatch.setattr(actions, "PATTERN_S", 0.05)
    with Server() as server:
        _, step = play(made(server, pattern="(a|a)*[bc]"), ["a" * 40])
    assert (step.observation, step.done) == ("This is no valid action: nothing in it fits (a|a)*[bc]", False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": []}, "give --agent.url"),
        ({"url": ["localhost"]}, "'localhost' is no address"),
        ({"url": ["http://127.0.0.1:9"], "action": "[1]"}, "is no JSON object"),
        ({"url": ["http://127.0.0.1:9"], "action": "{x"}, "neither auto, json nor a JSON object"),
        ({"url": ["http://127.0.0.1:9"], "pattern": "("}, "no regular expression"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UserError, match=message):
        OpenEnv(OpenEnv.Options(**options))


def test_a_run_needs_a_server_that_answers_and_trains_on_its_rewards(tmp_path):
    pytest.importorskip("rlhf_plugin_rloo", reason="a whole run needs an algorithm")
    settings = {"rollout.n": 4, "train.batch_size": 2, "train.steps": 2, "train.threads": 1, "rollout.max_new_tokens": 4}
    settings |= {"model": "quickstart", "data": SUMS, "run_dir": str(tmp_path / "run")}
    with Server(room=8) as server:
        agent = {"name": "openenv", "url": server.url, "at_once": 8, "prompt": "{prompt}", "observation": "0=", "max_turns": 3}
        run = rlhf_host.train(algo="rloo", agent=agent, **settings)
        assert server.sessions == 16
        assert run.metrics
    with pytest.raises((UserError, RunError), match="does not answer as an OpenEnv server"):
        rlhf_host.train(
            algo="rloo", agent={**agent, "url": "http://127.0.0.1:9"}, **settings | {"run_dir": str(tmp_path / "other")}
        )
