"""Rollouts in which nothing moves: they are told, named and ended; slow ones are left alone."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from rlhf_host import RunError, ScoreContext, Step, hookimpl
from rlhf_host.config.schema import RolloutConfig
from rlhf_host.rollouts import watch

from .pipelines import Slept, Slow, steps_of


class Stuck(Slept):
    async def generate(self, token_ids, sampling, key):
        await asyncio.sleep(3600)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_rollout_in_which_nothing_moves_is_told_and_ended(pipeline, depth, monkeypatch, caplog):
    monkeypatch.setattr(watch, "SAY_S", 0.05)
    made, gate = pipeline([1] * 8, depth=depth, settings=RolloutConfig(stall_s=0.4))
    gate.engine = Stuck(lambda ids, key: [4])
    message = r"no progress .*\(rollout.stall_s 0.4\): train-0 plays for 0 s, train-1 plays for 0 s"
    with pytest.raises(RunError, match=message):
        asyncio.run(asyncio.wait_for(steps_of(made, gate, 1), 5))
    assert "4 requests are with the engine" in caplog.text if depth == 0 else "and 1 more; 8 requests" in caplog.text


def told(pipeline, caplog, monkeypatch, prepare=lambda made, gate: None, **settings):
    """What the log says of a rollout in which nothing moves, and the error that ends it."""
    monkeypatch.setattr(watch, "SAY_S", 0.05)
    made, gate = pipeline([1] * 8, settings=RolloutConfig(stall_s=0.4), **settings)
    prepare(made, gate)
    with pytest.raises(RunError) as ended:
        asyncio.run(asyncio.wait_for(steps_of(made, gate, 1), 5))
    return caplog.text, str(ended.value)


def test_a_stall_names_the_hook_that_does_not_answer(pipeline, caplog, monkeypatch):
    class Stuck(Slow):
        @hookimpl
        async def agent_step(self, episode, action):
            await asyncio.sleep(3600)

    said, ended = told(pipeline, caplog, monkeypatch, agent=Stuck())
    assert "and 1 more; 8 calls of agent_step are with agent:single_turn" in said
    assert "requests are with" not in said
    assert ended.endswith("8 calls of agent_step are with agent:single_turn")


def test_requests_that_failed_or_were_cancelled_are_not_with_the_engine(pipeline, caplog, monkeypatch):
    """The agent gives up on its first two, and waits for the third."""

    class Odd(Slept):
        async def generate(self, token_ids, sampling, key):
            await asyncio.sleep(3600)

    class Impatient:
        @hookimpl
        async def agent_run(self, episode, policy):
            for _ in range(2):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(policy.generate([3, 4]), 0.01)
            await policy.generate([3, 4])

    def prepare(made, gate):
        gate.engine = Odd(lambda ids, key: [4])

    said, _ = told(pipeline, caplog, monkeypatch, prepare, agent=Impatient())
    assert "; 8 requests are with the engine; 8 calls of agent_run are with agent:single_turn" in said


def test_a_deadlock_of_the_host_is_noticed_at_once_and_said(pipeline):
    """A gate that nobody opens: nothing is with the engine, and no plugin is at work."""
    made, gate = pipeline([1] * 8, settings=RolloutConfig(stall_s=0.0))  # no other limit

    async def run():
        await made.published(0)
        gate.close()
        started = time.monotonic()
        with pytest.raises(RunError) as ended:
            await asyncio.wait_for(made.next_rollouts(ScoreContext(step=1)), 20)
        await made.close()
        return str(ended.value), time.monotonic() - started

    message, seconds = asyncio.run(run())
    assert message.startswith("the rollout cannot go on: train-0 plays for 5 s, train-1")
    assert "no request is with the engine, and no plugin is at work; 8 requests wait for new weights" in message
    assert message.endswith("This is a bug in rlhf-host: please report it")
    assert seconds < 7


def test_a_wait_of_the_host_that_ends_by_itself_is_no_deadlock(pipeline, monkeypatch):
    """Between two calls of plugins the event loop is busy for longer than the watch waits."""
    monkeypatch.setattr(watch, "SAY_S", 0.01)

    class Busy(Slow):
        @hookimpl
        async def agent_step(self, episode, action):
            time.sleep(0.02)
            return Step(done=True)

    made, gate = pipeline([1] * 8, agent=Busy())
    assert len(asyncio.run(steps_of(made, gate, 2))) == 2


def test_a_slow_rollout_in_which_something_moves_is_left_alone(pipeline, monkeypatch, caplog):
    monkeypatch.setattr(watch, "SAY_S", 0.4)
    made, gate = pipeline([100 * i for i in range(16)], depth=1, settings=RolloutConfig(stall_s=1.0), batch=8, steps=1)
    asyncio.run(asyncio.wait_for(steps_of(made, gate, 1), 5))
    assert not caplog.messages
