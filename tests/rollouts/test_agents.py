"""Agents: how their policy samples, how long they may take, and what they say that nothing can make of."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import pytest

from rlhf_host import RunError, Step, Trajectory, hookimpl
from rlhf_host.config.schema import RolloutConfig
from rlhf_host.records.episodes import Sampling, Segment

from .playing import Guess, Length, load

RUN = Sampling(max_new_tokens=8, temperature=0.7, stop=("x",))


class Own:
    """One answer to the prompt ``5, 6``, sampled as ``asked`` of the run's settings."""

    def __init__(self, asked=lambda sampling: None, prompt=(5, 6), more=()):
        self.asked, self.prompt, self.more = asked, list(prompt), list(more)
        self.closed = []

    @hookimpl
    async def agent_run(self, episode, policy):
        answer = await policy.generate(self.prompt, self.asked(policy.sampling))
        segments = [Segment("prompt", self.prompt), Segment("action", answer.token_ids, answer.logprobs, answer.versions)]
        segments += [Segment("observation", self.more)] if self.more else []
        return [Trajectory(episode.episode_id, episode.group_id, episode.task, segments, agent_rewards=[1.0])]

    @hookimpl
    def agent_close(self, episode):
        self.closed.append(episode.episode_id)


@pytest.mark.parametrize(
    ("asked", "sampled"),
    [
        (lambda run: None, RUN),
        (lambda run: dataclasses.replace(run, max_new_tokens=3), dataclasses.replace(RUN, max_new_tokens=3)),
        (lambda run: dataclasses.replace(run, max_new_tokens=999), RUN),
        (lambda run: Sampling(4, 0.7, stop=("y",)), dataclasses.replace(RUN, max_new_tokens=4, stop=("x", "y"))),
    ],
)
def test_an_agent_may_ask_for_fewer_tokens_and_more_stops(collect, asked, sampled):
    agent = Own(asked)
    _, engine = collect(load(agent=agent), groups=1, n=2, sampling=RUN, script=lambda ids, key: [8])
    assert [sampling for _, sampling, _ in engine.calls] == [sampled] * 2
    assert len(agent.closed) == 2, "agent_close follows agent_run too"


@pytest.mark.parametrize("change", [{"temperature": 0.2}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_what_trains_is_sampled_from_the_run_s_own_distribution(collect, change):
    agent = Own(lambda run: dataclasses.replace(run, **change))
    (name, value), *_ = change.items()
    with pytest.raises(
        RunError, match=rf"failed in agent_run: ValueError: it asks for .*{name} {value}.*trains on temperature 0.7"
    ):
        collect(load(agent=agent), groups=1, n=1, sampling=RUN)
    _, engine = collect(load(agent=agent), groups=1, n=1, sampling=RUN, split="eval", script=lambda ids, key: [8])
    assert engine.calls[0][1] == dataclasses.replace(RUN, **change), "an evaluation trains nothing"


def test_an_agent_with_its_own_loop_keeps_within_max_tokens(collect):
    _, engine = collect(load(agent=Own(prompt=range(3, 15))), groups=1, n=1, max_tokens=16, script=lambda ids, key: [8] * 9)
    assert engine.calls[0][1].max_new_tokens == 4
    for agent, reason in (
        (Own(prompt=[5] * 16), "no room is left"),
        (Own(more=[7] * 16), "19 tokens, more than max_tokens 16"),
    ):
        with pytest.raises(RunError, match=reason):
            collect(load(agent=agent), groups=1, n=1, max_tokens=16, script=lambda ids, key: [8])


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
    with pytest.raises(RunError, match=f"agent:single_turn: no answer of {hook} in 0.05 s"):
        collect(load(Length(), agent=agent), groups=1, n=2, settings=RolloutConfig(step_timeout_s=0.05))
    agent.released.set()


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
        (None, "agent:single_turn gave a NoneType from agent_run, expected Iterable"),
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

    with pytest.raises(RunError, match=r"could not be judged.*no tokens for the observation '漢字'"):
        collect(load(agent=Foreign()), groups=1)
