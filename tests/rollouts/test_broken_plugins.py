"""Hooks that break their rules, fail or are interrupted: what is said, and that all episodes are closed."""

import asyncio
import gc
import warnings

import pytest
from rlhf_authoring.engines import ScriptedEngine

from rlhf_host import (
    RunError,
    ScoreContext,
    Step,
    Task,
    Trajectory,
    UserError,
    hookimpl,
)
from rlhf_host.data.stream import Draw
from rlhf_host.records.episodes import Sampling
from rlhf_host.rollouts.collect import Collected, Collector
from rlhf_host.rollouts.episode_settings import EpisodeSettings, SampledModel
from rlhf_host.rollouts.episodes import Episodes
from rlhf_host.rollouts.experience import apply_rewards, make_experience
from rlhf_host.rollouts.gate import Gate

from .playing import Guess, Length, load


def applied(collect, plugin):
    manager = load(Length(), plugin)
    found, _ = collect(manager, groups=2)
    experience = make_experience(found.groups, {"p0": 1.0}, step=1, max_new_tokens=8, temperature=1.0)
    apply_rewards(experience, manager)
    return experience


def test_a_transform_that_works_in_place_reaches_the_token_rewards_too(collect):
    class InPlace:
        @hookimpl
        def transform_rewards(self, experience, rewards):
            return rewards.clamp_(max=1.5)

    experience = applied(collect, InPlace())
    assert experience.rewards.max() == 1.5
    assert experience.token_rewards.sum(-1).tolist() == pytest.approx(experience.rewards.tolist())


@pytest.mark.parametrize(
    ("hook", "result", "message"),
    [
        (
            "transform_rewards",
            lambda e: e.rewards[:1],
            r"extension:p1 gave \[1\] from transform_rewards, expected a tensor \[4\]",
        ),
        ("transform_rewards", lambda e: None, "gave NoneType from transform_rewards"),
        ("transform_rewards", lambda e: e.rewards * float("nan"), "gave non-finite numbers from transform_rewards"),
        ("shape_rewards", lambda e: e.rewards, r"gave \[4\] from shape_rewards"),
        (
            "loss_masks",
            lambda e: e.action_mask.float(),
            r"gave \[4, 3\] of torch.float32 from loss_masks, .* of bool",
        ),
    ],
)
def test_results_of_the_wrong_kind_name_the_plugin(collect, hook, result, message):
    def implementation(self, experience):
        return result(experience)

    implementation.__name__ = hook
    plugin = type("Wrong", (), {hook: hookimpl(implementation)})()
    with pytest.raises(RunError, match=message):
        applied(collect, plugin)


def test_an_observation_that_does_not_fit_ends_the_trajectory_within_its_bound(collect):
    class Verbose(Guess):
        @hookimpl
        def agent_step(self, episode, action):
            return Step("a" * 500, reward=0.0)

    found, _ = collect(load(agent=Verbose()), groups=1, n=1, max_tokens=16, script=lambda ids, key: [9])
    (trajectory,) = found.groups[0].trajectories
    assert trajectory.truncated
    assert sum(len(s.token_ids) for s in trajectory.segments) <= 16


def test_an_agent_reward_that_is_not_finite_is_unjudged(collect):
    class Bad(Guess):
        @hookimpl
        def agent_step(self, episode, action):
            return Step(reward=float("nan"), done=True)

    with pytest.raises(RunError, match="agent: a reward that is not finite"):
        collect(load(agent=Bad()), groups=1)


@pytest.mark.parametrize(
    ("group", "logprobs", "message"),
    [("other", [-1.0], "the episode's own group_id"), (None, None, "some tokens lack their log-probability")],
)
def test_an_agent_s_own_trajectories_are_checked(collect, group, logprobs, message):
    from rlhf_host import Segment

    class Own:
        @hookimpl
        async def agent_run(self, episode, policy):
            segments = [Segment("prompt", [5]), Segment("action", [6], logprobs, [0])]
            return [Trajectory(episode.episode_id, group or episode.group_id, episode.task, segments, agent_rewards=[1.0])]

    with pytest.raises(RunError, match=message):
        collect(load(agent=Own()), groups=1)


def test_a_hook_that_exits_is_a_failure_not_the_end_of_the_run(collect):
    class Leaves:
        @hookimpl
        def score(self, trajectories):
            raise SystemExit(2)

    with pytest.raises(RunError, match="SystemExit"):
        collect(load(Leaves()), groups=1)


class Waits(Guess):
    """Samples 1 and up wait for ever; sample 0 does ``first``."""

    def __init__(self, first):
        super().__init__()
        self.first = first

    @hookimpl
    async def agent_step(self, episode, action):
        if episode.sample:
            await asyncio.Event().wait()
        self.first()


def fails():
    raise UserError("a broken tool")


def test_the_first_failure_ends_all_episodes_and_closes_them(collect):
    agent = Waits(fails)
    with pytest.raises(BaseException, match="a broken tool"):
        collect(load(agent=agent), groups=2, n=3)
    assert len(agent.opened) == 6
    assert sorted(agent.closed) == sorted(agent.opened)


class Odd(BaseException):
    """Not an ``Exception``, as what test frameworks raise."""


@pytest.mark.parametrize("error", [Odd, asyncio.CancelledError, SystemExit])
def test_what_is_no_exception_ends_its_episode_as_any_failure_of_an_agent_does(error, collect):
    class Leaves(Guess):
        @hookimpl
        async def agent_step(self, episode, action):
            raise error("unusual")

    with pytest.raises(RunError, match=f"{error.__name__}: unusual"):
        collect(load(agent=Leaves()), groups=2, n=3)


def test_an_interrupt_ends_all_episodes_and_closes_them(collect, monkeypatch):
    runs, fill = [], Collector.fill

    async def noted(self, *arguments):
        runs.append(asyncio.current_task())
        return await fill(self, *arguments)

    monkeypatch.setattr(Collector, "fill", noted)
    agent = Waits(lambda: runs[0].cancel())
    with pytest.raises(asyncio.CancelledError):
        collect(load(agent=agent), groups=2, n=3)
    assert agent.opened
    assert set(agent.opened) <= set(agent.closed), "one whose reset had not begun is closed too"
    assert len(set(agent.closed)) == len(agent.closed)


def test_a_task_for_an_unknown_agent_leaves_nothing_running(collect):
    tasks = [Task("12", "12", index=i, source="made", prompt_ids=(3, 4), agent=name) for i, name in enumerate([None, "nobody"])]
    agent = Guess()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserError, match="asks for the agent 'nobody'"):
            collect(load(agent=agent), groups=2, n=3, tasks=tasks)
        gc.collect()
    assert agent.opened == agent.closed == []


def test_cancelled_twice_it_still_closes_all_episodes(tokenizer):
    """An outer timeout and an interrupt at once, say."""

    class Slow(Guess):
        @hookimpl
        async def agent_step(self, episode, action):
            await asyncio.Event().wait()

        @hookimpl
        async def agent_close(self, episode):
            await asyncio.sleep(0.05)
            self.closed.append(episode.episode_id)

    async def interrupted(agent):
        manager = load(agent=agent)
        engine = ScriptedEngine(lambda ids, key: [5])
        episodes = Episodes(
            manager,
            SampledModel(engine=Gate(engine), tokenizer=tokenizer),
            EpisodeSettings(sampling=Sampling(8), max_tokens=64),
        )
        collector = Collector(episodes, n=2, seed=7, split="train")
        draws = [Draw(Task("12", "12", index=0, source="made", prompt_ids=(3, 4)), 0)]
        running = asyncio.create_task(collector.run(draws, ScoreContext(), Collected()))
        for _ in range(2):
            await asyncio.sleep(0.02)
            running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        manager.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    agent = Slow()
    asyncio.run(interrupted(agent))
    assert len(agent.opened) == 2
    assert sorted(agent.closed) == sorted(agent.opened)


def test_a_reward_cannot_change_the_order_of_the_trajectories(collect):
    class Sorted:
        @hookimpl
        def score(self, trajectories, context):
            trajectories.sort(key=lambda row: row.action_length)
            return [1.0] + [0.0] * (len(trajectories) - 1)

    with pytest.raises(RunError, match="no attribute 'sort'"):
        collect(load(Sorted()), groups=1)
