"""The gate before the engine: nothing passes while weights change."""

from __future__ import annotations

import asyncio

from rlhf_host.records.episodes import Sampling
from rlhf_host.rollouts.gate import Gate

from .pipelines import Slept


def test_a_closed_gate_lets_no_request_through_and_waits_for_those_under_way():
    engine = Slept(lambda ids, key: [4])
    gate = Gate(engine)

    async def run():
        gate.expect(3)
        gate.expect(2)
        first = asyncio.create_task(gate.generate([3], Sampling(max_new_tokens=2), (0, 0, 0)))
        await asyncio.sleep(0)
        await gate.hold()
        assert first.done() or engine.calls, "it was under way"
        assert gate.in_flight == 0
        second = asyncio.create_task(gate.generate([3], Sampling(max_new_tokens=2), (0, 1, 0)))
        gate.expect(-2)
        await asyncio.sleep(0.01)
        assert len(engine.calls) == 1
        engine.version = 1
        gate.release()
        assert (await second).versions == [1]

    asyncio.run(run())
    assert engine.expected == [3, 5, 0, 3], "while it is closed nobody will come"


def test_requests_that_are_cancelled_do_not_hold_the_gate():
    gate = Gate(Slept(lambda ids, key: [4]))

    async def run():
        asked = asyncio.create_task(gate.generate([3], Sampling(max_new_tokens=2), (0, 0, 0)))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait_for(gate.hold(), 1)

    asyncio.run(run())


def test_requests_to_an_engine_that_has_the_weights_of_another_wait_with_those_of_the_other():
    """Such is a mixture of the policy and its reference in this process: an update changes its weights."""
    actor, mixture = Gate(Slept(lambda ids, key: [4])), Slept(lambda ids, key: [4])
    gate = Gate(mixture, actor)

    async def run():
        first = asyncio.create_task(gate.generate([3], Sampling(max_new_tokens=2), (0, 0, 0)))
        await asyncio.sleep(0)
        assert actor.in_flight == 1
        await actor.hold()
        assert first.done() or mixture.calls, "it was under way"
        second = asyncio.create_task(gate.generate([3], Sampling(max_new_tokens=2), (0, 1, 0)))
        await asyncio.sleep(0.01)
        assert len(mixture.calls) == 1
        mixture.version = 1
        actor.release()
        assert (await second).versions == [1]

    asyncio.run(run())
