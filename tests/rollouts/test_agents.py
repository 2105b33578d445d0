"""Agents: how their policy samples, and what becomes of their rows."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from itertools import pairwise

import pytest

from rlhf_host import Reward, RunError, Step, Trajectory, hookimpl
from rlhf_host.config.schema import EvalConfig
from rlhf_host.functional import leave_one_out
from rlhf_host.records.episodes import Sampling, Segment
from rlhf_host.rollouts.experience import make_experience, reward_metrics
from rlhf_host.rollouts.summary import summary
from rlhf_host.training.records import json_line, record

from .playing import Guess, Own, load

RUN = Sampling(max_new_tokens=8, temperature=0.7, stop=("x",))


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


# --- what fails one episode, and what the run ---------------------------------------------------


# --- rows of several roles, and rows without the answer ------------------------------------------


def row(episode, token, **more):
    segments = [Segment("prompt", [3, 4]), Segment("action", [token], [-0.5], [0])]
    return Trajectory(episode.episode_id, episode.group_id, episode.task, segments, sample=episode.sample, **more)


class Plays:
    """Gives the rows that ``rows(episode)`` makes."""

    def __init__(self, rows):
        self.rows = rows

    @hookimpl
    async def agent_run(self, episode, policy):
        return self.rows(episode)


class Judge:
    """The reward is the first sampled token."""

    def __init__(self):
        self.judged = []

    @hookimpl
    def score(self, trajectories):
        self.judged += [trajectory.row for trajectory in trajectories]
        rewards = [Reward(float(trajectory.actions[0].token_ids[0]), score=1.0) for trajectory in trajectories]
        return rewards


def test_only_final_rows_are_judged_and_the_others_take_their_reward(collect):
    judge = Judge()
    agent = Plays(lambda episode: [row(episode, 9, final=False), row(episode, 5 + episode.sample)])
    found, _ = collect(load(judge, agent=agent), groups=1, n=2)
    assert judge.judged == [1, 1]
    rows = found.groups[0].trajectories
    assert [(one.final, one.reward, one.score) for one in rows] == [
        (False, 5.0, 1.0),
        (True, 5.0, 1.0),
        (False, 6.0, 1.0),
        (True, 6.0, 1.0),
    ]
    experience = make_experience(found.groups, {"p0": 1.0}, step=1, max_new_tokens=8, temperature=1.0)
    assert experience.rewards.tolist() == [5.0, 5.0, 6.0, 6.0]
    assert reward_metrics(experience)["reward/mean"] == 5.5


def test_a_row_s_own_rewards_stand_in_place_of_the_agent_s(collect):
    agent = Plays(lambda episode: [row(episode, 9, final=False, agent_rewards=[0.25]), row(episode, 5, agent_rewards=[1.0])])
    found, _ = collect(load(Judge(), agent=agent), groups=1, n=1)
    assert [one.reward for one in found.groups[0].trajectories] == [5.25, 6.0]


def test_what_was_not_judged_is_not_judged_for_the_others_either(collect):
    class Silent:
        @hookimpl
        def score(self, trajectories):
            return [None if trajectory.sample else 1.0 for trajectory in trajectories]

    agent = Plays(lambda episode: [row(episode, 9, final=False), row(episode, 5)])
    found, _ = collect(load(Silent(), agent=agent), groups=1, n=2)
    assert [one.reward for one in found.groups[0].trajectories] == [1.0, 1.0]
    assert found.unjudged.total() == 2


def test_an_episode_without_a_final_row_has_failed(collect):
    with pytest.raises(RunError, match="gave no final row: set final on the one with the answer"):
        collect(load(Judge(), agent=Plays(lambda episode: [row(episode, 9, final=False)])), groups=1)


def test_seats_of_a_game_are_groups_apart(collect):
    """Black always wins: neither seat's reward is a baseline of the other's."""

    def seats(episode):
        return [row(episode, 9, role="black", agent_rewards=[1.0]), row(episode, 9, role="white", agent_rewards=[-1.0])]

    found, _ = collect(load(agent=Plays(seats)), groups=2, n=2)
    experience = make_experience(found.groups, {}, step=1, max_new_tokens=8, temperature=1.0)
    assert experience.group_id.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert experience.episode_id.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert leave_one_out(experience.rewards, experience.group_id, experience.episode_id).tolist() == [0.0] * 8
    assert summary(found.trajectories_in_order(), EvalConfig(n=2))["samples"] == 8


# --- calls side by side ---------------------------------------------------------------------------


class SideBySide:
    """Asks about three prompts at once, each after a delay of its own."""

    def __init__(self, delays):
        self.delays, self.answers = delays, []

    @hookimpl
    async def agent_run(self, episode, policy):
        async def one(prompt):
            await asyncio.sleep(self.delays[prompt - 5])
            return await policy.generate([prompt])

        prompts = [5, 6, 6]
        self.answers = await asyncio.gather(*map(one, prompts))
        [first] = [row for row in policy.trajectories() if row.prompt_ids == [5]]
        first.agent_rewards, first.final = [1.0], True
        return [first]


def test_random_numbers_do_not_depend_on_which_call_comes_first(collect):
    keys = []
    for delays in ([0.0, 0.02], [0.02, 0.0]):
        _, engine = collect(load(agent=SideBySide(delays)), groups=1, n=1, script=lambda ids, key: [8])
        keys.append({(prompt, key) for prompt, _, key in engine.calls})
    assert keys[0] == keys[1]
    assert len({key for _, key in keys[0]}) == 3, "asked twice, a prompt is answered twice"


def test_engines_do_not_wait_for_a_program_that_is_busy_with_something_else(collect):
    class Busy(Own):
        @hookimpl
        async def agent_run(self, episode, policy):
            await policy.generate([5])
            await asyncio.sleep(0.3)
            return await super().agent_run(episode, policy)

    _, engine = collect(load(agent=Busy()), groups=1, n=2, script=lambda ids, key: [8])
    assert engine.expected[:2] == [1, 2], "an episode that begins is waited for"
    assert 0 in engine.expected[:-2], "one that is busy is not"
    assert engine.expected[-1] == 0
    assert min(engine.expected) == 0


def test_engines_do_not_wait_for_hooks_that_wait_for_something_else(collect):
    """As for a free sandbox: one episode's reset ends once another's is over."""

    class Slots(Guess):
        free = None

        @hookimpl
        async def agent_reset(self, episode):
            self.free = self.free or asyncio.Semaphore(1)
            await self.free.acquire()
            return Step("go")

        @hookimpl
        async def agent_step(self, episode, action):
            if episode.sample == 0:
                await asyncio.sleep(1.2)
            return Step(reward=1.0, done=True)

        @hookimpl
        async def agent_close(self, episode):
            self.free.release()

    found, engine = collect(load(agent=Slots()), groups=1, n=3)
    assert found.states["finished"] == 3
    assert 0 in engine.expected[:-1], "while all are in a hook, nobody is waited for"
    assert any(after > before for before, after in pairwise(engine.expected)), "and they are again when they ask"
    assert engine.expected[-1] == 0
    assert min(engine.expected) == 0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda rows: rows + rows, "gave one trajectory twice"),
        (lambda rows: [setattr(rows[0], "agent_rewards", [1.0] * 3)] and rows, r"gave the agent_rewards .* for 1 turns"),
        (lambda rows: [setattr(rows[0], "agent_rewards", 1.0)] and rows, "gave the agent_rewards 1.0 for 1 turns"),
        (
            lambda rows: [setattr(rows[0].actions[0], "logprobs", [float("nan")])] and rows,
            "log-probabilities that are not finite",
        ),
    ],
)
def test_rows_that_would_train_wrongly_are_refused(spoil, message, collect):
    class Odd:
        @hookimpl
        async def agent_run(self, episode, policy):
            await policy.generate([5, 6])
            rows = policy.trajectories()
            rows[0].agent_rewards = [1.0]
            return spoil(rows) if episode.sample == 0 else rows

    found, _ = collect(load(agent=Odd()), groups=1, n=2, script=lambda ids, key: [8])
    assert found.states["failed"] == 1
    assert re.search(message, found.unjudged_rows[0].unjudged_reason)


def test_what_an_agent_notes_is_in_the_log_of_its_episode(collect):
    class Notes(Guess):
        @hookimpl
        def agent_step(self, episode, action):
            episode.log("note", sample=episode.sample, nan=float("nan"), text="\ud800")
            if episode.sample == 1:
                endless: list[object] = []
                endless.append(endless)
                episode.log("endless", value=endless)
            return Step(reward=1.0, done=True)

    found, _ = collect(load(agent=Notes()), groups=1, n=2)
    [good], [failed] = found.groups[0].trajectories, found.unjudged_rows
    assert [event["kind"] for event in good.events] == ["call", "note"]
    assert [event["kind"] for event in failed.events] == ["call", "note"]
    assert "episode.log of 'endless': Circular reference detected" in failed.unjudged_reason
    line = json.loads(json_line(record(dataclasses.replace(good, decode=str))))
    assert [event["kind"] for event in line["events"]] == ["call", "note"]
    assert line["events"][1]["nan"] is None


# --- chat, forks -----------------------------------------------------------------------------------


def test_an_agent_may_talk_in_messages(collect, tokenizer):
    class Talks:
        @hookimpl
        async def agent_run(self, episode, policy):
            messages = [{"role": "user", "content": "1+1"}]
            for word in ("2", "3"):
                reply = await policy.chat(messages, max_new_tokens=3)
                assert reply.content
                assert reply.call_id
                messages += [reply.message, {"role": "user", "content": word}]
            helper = policy.fork("helper")
            await helper.chat([{"role": "user", "content": "12"}])
            opponent = policy.fork("opponent", trainable=False)
            await opponent.chat([{"role": "user", "content": "12"}])
            rows = policy.trajectories()
            for one in rows:
                one.agent_rewards = [1.0] * len(one.actions)
            return rows

    digit = tokenizer.encode("7", add_special_tokens=False)[0]
    found, engine = collect(load(agent=Talks()), groups=1, n=2, script=lambda ids, key: [digit] * 5)
    rows = found.groups[0].trajectories
    assert [(one.role, one.final, len(one.actions), one.row) for one in rows] == [("", True, 2, 0), ("helper", False, 1, 1)] * 2
    assert rows[0].actions[0].token_ids == [digit] * 3
    assert len(engine.calls) == 8


def test_where_forks_alone_answer_each_has_a_final_row(collect, tokenizer):
    class Plays:
        @hookimpl
        async def agent_run(self, episode, policy):
            seats = [policy.fork("black"), policy.fork("white")]
            for seat in seats:
                await seat.chat([{"role": "user", "content": "12"}])
                second = await seat.chat([{"role": "user", "content": "34"}])
            rows = policy.trajectories()
            assert [row.final for row in policy.trajectories(second.call_id)] == [False, False, False, True]
            for row in rows:
                row.agent_rewards = [1.0]
            return rows

    digit = tokenizer.encode("7", add_special_tokens=False)[0]
    found, _ = collect(load(agent=Plays()), groups=1, n=1, script=lambda ids, key: [digit])
    rows = found.groups[0].trajectories
    assert [(row.role, row.final) for row in rows] == [("black", False), ("black", True), ("white", False), ("white", True)]


def test_what_an_agent_gives_as_true_is_a_number(collect):
    class Wins(Guess):
        @hookimpl
        def agent_step(self, episode, action):
            return Step(reward=True, score=True, metrics={"won": True}, done=True)

    found, _ = collect(load(agent=Wins()), groups=1, n=1)
    [row] = found.groups[0].trajectories
    assert [type(value) for value in (row.score, *row.metrics.values(), *row.agent_rewards)] == [float] * 3


def test_the_tools_of_a_step_go_into_the_prompt_and_calls_are_read(collect, tokenizer):
    """With plain text there are none, which is said."""

    class Tools(Guess):
        @hookimpl
        def agent_reset(self, episode):
            return Step("go", tools=[{"type": "function", "function": {"name": "add"}}])

    with pytest.raises(RunError, match="plain text has no tools: put the tools into the system prompt"):
        collect(load(agent=Tools()), groups=1)
