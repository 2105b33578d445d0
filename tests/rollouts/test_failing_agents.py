"""Agents that are late, fail or give what nobody can use: which episode that costs, and what is said of it."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import threading

import pytest

from rlhf_host import AgentNeeds, RunError, Step, UserError, hookimpl
from rlhf_host.config.schema import RolloutConfig
from rlhf_host.records.metric_names import MetricNames

from . import virtual_time
from .playing import Guess, Length, Own, load


class Hangs(Guess):
    """Takes for ever in one hook."""

    def __init__(self, hook, *, thread):
        super().__init__()
        self.hook, self.thread, self.released = hook, thread, threading.Event()

    def take(self, hook, answer):
        if hook != self.hook:
            return answer
        if self.thread:
            self.released.wait(20)
            return answer
        return asyncio.sleep(20)

    @hookimpl
    def agent_reset(self, episode):
        return self.take("agent_reset", Step("go:"))

    @hookimpl
    def agent_step(self, episode, action):
        return self.take("agent_step", Step(reward=1.0, done=True))

    @hookimpl
    def agent_close(self, episode):
        return self.take("agent_close", None)


@pytest.mark.parametrize("thread", [True, False])
@pytest.mark.parametrize("hook", ["agent_reset", "agent_step", "agent_close"])
def test_an_agent_that_is_late_has_failed(collect, hook, thread):
    agent = Hangs(hook, thread=thread)
    plugins, play = load(Length(), agent=agent, threads=thread), None if thread else virtual_time.run
    with pytest.raises(RunError, match=f"agent:single_turn: no answer of {hook} in 1 s"):
        collect(plugins, groups=1, n=2, settings=RolloutConfig(step_timeout_s=1), play=play)
    agent.released.set()


@pytest.mark.parametrize("wrong", [RuntimeError("closed twice"), None])
def test_what_failed_first_is_said(collect, wrong):
    class Late(Hangs):
        @hookimpl
        def agent_close(self, episode):
            if wrong is not None:
                raise wrong
            return asyncio.sleep(20)

    plugins = load(Length(), agent=Late("agent_step", thread=False), threads=False)
    with pytest.raises(RunError, match=r"agent:single_turn: no answer of agent_step in 0\.2 s"):
        collect(plugins, groups=1, settings=RolloutConfig(step_timeout_s=0.2), play=virtual_time.run)


def test_an_agent_with_its_own_loop_has_a_deadline_for_the_episode(collect):
    class Never(Own):
        @hookimpl
        async def agent_run(self, episode, policy):
            await asyncio.sleep(20)

    agent = Never()
    with pytest.raises(RunError, match=r"agent:single_turn: no answer of agent_run in 0\.05 s"):
        collect(load(agent=agent), groups=1, n=2, settings=RolloutConfig(episode_timeout_s=0.05))
    assert len(agent.closed) == 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "agent:single_turn gave a NoneType from agent_run, expected a list of trajectories"),
        (lambda episode: ["text"], "agent:single_turn gave a str from agent_run, expected Trajectory"),
    ],
)
def test_wrong_rows_name_the_agent(collect, answer, message):
    class Wrong:
        @hookimpl
        async def agent_run(self, episode, policy):
            return answer and answer(episode)

    with pytest.raises(RunError, match=message):
        collect(load(agent=Wrong()), groups=1)


@pytest.mark.parametrize("hook", ["agent_reset", "agent_step"])
def test_an_answer_that_is_no_step_names_the_agent(collect, hook):
    agent = Guess()
    wrong = type("Wrong", (Guess,), {hook: hookimpl(lambda self, episode: "again")})
    wrong.__dict__[hook].__name__ = hook
    assert agent.closed == []
    with pytest.raises(RunError, match=f"agent:single_turn gave a str from {hook}, expected Step"):
        collect(load(agent=wrong()), groups=1)


def test_an_observation_that_no_token_stands_for_fails_the_episode(collect):
    class Foreign(Guess):
        @hookimpl
        def agent_step(self, episode, action):
            return Step("漢字")

    with pytest.raises(RunError, match=r"could not be judged.*no tokens for the text '漢字'"):
        collect(load(agent=Foreign()), groups=1)


class Troubled(Guess):
    """Sample 0 of each task does ``trouble`` in one hook, the others play."""

    def __init__(self, hook, trouble):
        super().__init__()
        self.hook, self.trouble = hook, trouble

    def at(self, hook, episode, answer):
        return self.trouble() if hook == self.hook and episode.sample == 0 else answer

    @hookimpl
    async def agent_reset(self, episode):
        return self.at("agent_reset", episode, Step("go:"))

    @hookimpl
    async def agent_step(self, episode, action):
        return self.at("agent_step", episode, Step(reward=1.0, done=True))

    @hookimpl
    def agent_close(self, episode):
        super().agent_close(episode)
        return self.at("agent_close", episode, None)


def breaks():
    raise OSError("the sandbox is gone")


@pytest.mark.parametrize("hook", ["agent_reset", "agent_step", "agent_close"])
def test_an_exception_of_an_agent_fails_its_episode_alone(collect, hook, caplog):
    agent = Troubled(hook, breaks)
    found, _ = collect(load(agent=agent), groups=3, n=4)
    assert [len(group.trajectories) for group in found.groups] == [3, 3, 3]
    metrics = found.metrics(MetricNames("filters"))
    assert (metrics["rollout/finished"], metrics["rollout/truncated"], metrics["rollout/failed"]) == (9, 0, 3)
    assert metrics["rollout/failed/single_turn:OSError"] == 3
    traced, counted = [record for record in caplog.records if "the sandbox is gone" in record.message]
    assert "breaks" in (traced.exc_text or ""), "the first of a kind, with its traceback"
    assert "3 of 12 trajectories could not be judged" in counted.message
    assert len(agent.closed) == 12


@pytest.mark.parametrize(("hook", "answer"), [("agent_reset", "text"), ("agent_step", {"done": True}), ("agent_step", Step())])
def test_an_answer_that_nobody_can_use_fails_its_episode_alone(collect, hook, answer):
    found, _ = collect(load(agent=Troubled(hook, lambda: answer)), groups=2, n=4)
    assert found.metrics(MetricNames("filters"))["rollout/failed/single_turn:TypeError"] == 2
    assert found.trajectories == 6


class OddRequests(Own):
    """Asks for what no engine can give, in the first episode of each group."""

    def __init__(self, ask):
        super().__init__()
        self.ask = ask

    @hookimpl
    async def agent_run(self, episode, policy):
        if episode.sample == 0:
            await self.ask(policy)
        return await super().agent_run(episode, policy)


def _generate(*, prompt=(5, 6), **change):
    return lambda policy: policy.generate(prompt, dataclasses.replace(policy.sampling, **change))


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (_generate(temperature=1e-39), "ValueError: temperature should be 0 (greedy), or a number from 0.01 to 100, not 1e-39"),
        (_generate(temperature=float("nan")), "ValueError: temperature should be"),
        (_generate(top_k=1 << 70), "ValueError: top_k should be"),
        (_generate(top_p=0.0), "ValueError: top_p should be"),
        (_generate(max_new_tokens=0), "ValueError: max_new_tokens should be"),
        (_generate(max_new_tokens=2.5), "ValueError: max_new_tokens should be"),
        (_generate(stop=("",)), "ValueError: stop should be"),
        (_generate(stop_token_ids=("x",)), "ValueError: stop_token_ids should be"),
        (_generate(prompt=[]), "ValueError: token_ids: there are none"),
        (_generate(prompt=[5, 1 << 30]), "ValueError: token_ids: tokens are whole numbers from 0 to"),
        (_generate(prompt=[-1]), "ValueError: token_ids: tokens are"),
        (_generate(prompt=[1.5]), "ValueError: token_ids: tokens are"),
        (lambda policy: policy.chat([{"role": "user", "content": "hi"}], stop=[3]), "ValueError: stop should be"),
        (lambda policy: policy.chat([{"role": "user", "content": "hi"}], max_new_tokens=-1), "ValueError: max_new_tokens"),
    ],
)
def test_a_request_that_no_engine_can_answer_fails_its_episode_alone(collect, ask, told):
    found, _ = collect(load(agent=OddRequests(ask)), groups=2, n=4, split="eval")
    assert found.trajectories == 6
    [(reason, count)] = found.failed.items()
    assert count == 2
    assert told in reason


class OddRows(Own):
    @hookimpl
    async def agent_run(self, episode, policy):
        [row] = await super().agent_run(episode, policy)
        if episode.sample == 0:
            row.segments[0].token_ids = [1 << 30]
        return [row]


@pytest.mark.parametrize("agent", [OddRows(), Troubled("agent_step", lambda: Step([3, 1 << 30]))])
def test_tokens_that_the_model_does_not_have_fail_their_episode_alone(collect, agent):
    found, _ = collect(load(agent=agent), groups=2, n=4)
    assert found.trajectories == 6
    [reason] = found.failed
    assert "tokens are whole numbers from 0 to" in reason


def test_too_many_failures_end_the_run(collect):
    with pytest.raises(
        RunError, match=r"2 of 2 trajectories could not .* failed in agent_step: OSError: the sandbox is gone \(2"
    ):
        collect(load(agent=Troubled("agent_step", breaks)), groups=2, n=1)


def test_the_user_s_and_the_host_s_own_errors_end_the_run(collect):
    for error in (UserError("wrong"), RunError("lost")):

        def stops(error=error):
            raise error

        with pytest.raises(type(error), match=str(error)):
            collect(load(agent=Troubled("agent_step", stops)), groups=1, n=4)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Step({"role": "user", "content": "x"}), "gave an observation of the type dict; it is a text, messages or token ids"),
        (Step(5), "gave an observation of the type int"),
        (Step([10**12]), "gave an observation whose tokens are whole numbers from 0 to"),
        (Step(["a", "b"]), "messages with a role each, or token ids"),
        (Step("x", metrics=None), "gave metrics of the type NoneType"),
        (Step(done=True, metrics={3: 1.0}), "gave a metric with the name 3; a name is a text"),
        (Step(done=True, score="good"), "gave the score 'good'"),
        (Step(done=True, reward=[1.0]), r"gave \[1.0\] as a reward"),
    ],
    ids=str,
)
def test_a_step_that_no_one_can_use_fails_its_episode_by_name(step, message, collect):
    class Odd(Guess):
        @hookimpl
        def agent_step(self, episode, action):
            return dataclasses.replace(step) if episode.sample == 0 else Step(done=True, reward=1.0)

    found, _ = collect(load(agent=Odd()), groups=1, n=2)
    assert found.states["failed"] == 1
    assert re.search("agent:single_turn .*" + message, found.unjudged_rows[0].unjudged_reason)


def test_a_deadline_begins_when_an_episode_does(collect):
    class One:
        most = 0

        @hookimpl
        def needs(self):
            return AgentNeeds(rewards=False, episodes_at_once=1)

        @hookimpl
        async def agent_run(self, episode, policy):
            One.most += 1
            assert One.most == 1
            await policy.generate([5, 6])
            await asyncio.sleep(0.2)
            One.most -= 1
            rows = policy.trajectories()
            rows[0].agent_rewards = [1.0]
            return rows

    settings = RolloutConfig(episode_timeout_s=0.6)
    plugins = load(agent=One(), threads=False)
    found, _ = collect(plugins, groups=1, n=6, script=lambda ids, key: [8], settings=settings, play=virtual_time.run)
    assert found.states == {"finished": 6}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"metrics": {"x": "abc"}}, "gave 'abc' as the metric 'x'; a metric is a number"),
        ({"reward": "abc"}, "gave 'abc' as a reward"),
        ({"score": 7.0}, r"gave the score 7.0; a score lies in \[0, 1\]"),
    ],
)
def test_what_is_no_number_fails_its_episode(given, message, collect):
    class Odd(Guess):
        @hookimpl
        def agent_step(self, episode, action):
            return Step(**{"reward": 1.0, "done": True, **(given if episode.sample == 0 else {})})

    found, _ = collect(load(agent=Odd()), groups=1, n=2)
    assert found.states["failed"] == 1
    assert re.search(message, found.unjudged_rows[0].unjudged_reason)
