"""Groups that stay open across steps: order, failures, and where a resumed run goes on."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from rlhf_host import Drop, RunError, ScoreContext, hookimpl
from rlhf_host.config.schema import RolloutConfig

from . import virtual_time
from .pipelines import Slept, Slow, steps_of, stopped_after
from .playing import Length


def test_batches_come_in_draw_order_whoever_is_first(pipeline):
    made, gate = pipeline([40, 1, 30, 1, 20, 1, 10, 1, 1, 1, 1, 1])
    batches = asyncio.run(steps_of(made, gate, 6))
    assert [indices for indices, _ in batches] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    for step, (_, versions) in enumerate(batches):
        assert all(0 <= step - version <= 1 for version in versions)


def test_environments_play_while_the_trainer_works(pipeline):
    """Rollout and training take 0.1 s each."""

    async def run(depth):
        made, gate = pipeline([100] * 16, depth=depth, steps=8, threads=False)
        started = time.monotonic()
        await steps_of(made, gate, 8, train_s=0.1)
        return time.monotonic() - started

    walls = {depth: virtual_time.run(partial(run, depth)) for depth in (0, 1)}
    assert walls[1] < 0.75 * walls[0]


@pytest.mark.parametrize("state", [False, True])
def test_dropped_groups_are_replaced_and_filters_with_a_state_are_asked_in_draw_order(pipeline, state):
    asked = []

    class Odd:
        @hookimpl
        def keep_group(self, group):
            asked.append(group.task.index)
            return True if group.task.index % 2 else Drop("even")

    class Counting(Odd):
        @hookimpl
        def state_dict(self):
            return {"asked": len(asked)}

        @hookimpl
        def load_state_dict(self, state):
            pass

    made, gate = pipeline([20, 1] * 12, Counting() if state else Odd(), steps=4)
    batches = asyncio.run(steps_of(made, gate, 4))
    assert [indices for indices, _ in batches] == [[1, 3], [5, 7], [9, 11], [13, 15]]
    assert sorted(asked[:16]) == list(range(16)), "each once"
    assert (asked[:16] == list(range(16))) == state


def test_what_is_dropped_is_replaced_though_an_earlier_draw_is_not_over(pipeline):
    class Odd:
        @hookimpl
        def keep_group(self, group):
            return True if group.task.index % 2 else Drop("even")

    made, _ = pipeline(
        [1, 300, 100, 100, 100, 100, 1, 1],
        Odd(),
        depth=0,
        steps=1,
        batch=3,
        settings=RolloutConfig(max_refills=8),
        threads=False,
    )

    async def run():
        await made.published(0)
        started = time.monotonic()
        collected = await made.next_rollouts(ScoreContext(step=1))
        return [group.task.index for group in collected.groups], time.monotonic() - started

    indices, seconds = virtual_time.run(run)
    assert indices == [1, 3, 5]
    assert seconds < 0.39, "0.3 s for draw 1, while 2 to 5 take 0.1 s each, the last one begun after 2 and 4"


def test_with_depth_0_what_is_dropped_is_replaced_at_once_and_nothing_is_open_after_the_step(pipeline):
    """Rounds would wait 0.2 s three times: for the first, the third and the fifth."""

    class Odd:
        @hookimpl
        def keep_group(self, group):
            return True if group.task.index % 2 else Drop("even")

    made, _ = pipeline([1, 200, 1, 1, 200, 1] * 2, Odd(), depth=0, steps=2, batch=3, threads=False)

    async def run():
        await made.published(0)
        assert not made._open, "its step has not begun"
        started = time.monotonic()
        first = await made.next_rollouts(ScoreContext(step=1))
        assert time.monotonic() - started < 0.55
        assert not made._open
        assert not made.collector.open
        state = made.state_dict()
        await made.published(1)
        second = await made.next_rollouts(ScoreContext(step=2))
        return [[group.task.index for group in each.groups] for each in (first, second)], state["ordinal"]

    batches, ordinal = virtual_time.run(run)
    assert batches == [[1, 3, 5], [7, 9, 11]]
    assert ordinal == 6


def test_when_filters_refuse_everything_the_budget_ends_the_run(pipeline):
    class No:
        @hookimpl
        def keep_group(self, group):
            return Drop("never")

    made, gate = pipeline([1] * 40, No())
    with pytest.raises(RunError, match=r"no group was kept of 8 drawn: never \(8\)"):
        asyncio.run(steps_of(made, gate, 1))


def test_too_much_that_is_unjudged_ends_the_run_before_the_refills_do(pipeline):
    class Broken(Length):
        @hookimpl
        def score(self, trajectories):
            raise ConnectionError("the judge is down")

    made, gate = pipeline([1] * 40, Broken(), batch=3)
    with pytest.raises(
        RunError, match=r"6 of 6 .* could not be judged .*: the judge is down \(.*test_pipeline\.py:\d+\) \(6 times\)"
    ):
        asyncio.run(steps_of(made, gate, 1))


def test_what_ends_a_group_wakes_whoever_waits(pipeline):
    class Broken:
        @hookimpl
        def keep_group(self, group):
            raise ValueError("the filter is broken")

    made, gate = pipeline([1] * 8, Broken())
    with pytest.raises(RunError, match="the filter is broken"):
        asyncio.run(asyncio.wait_for(steps_of(made, gate, 1), 5))

    class Gone(Slept):
        async def generate(self, token_ids, sampling, key):
            raise RunError("the engine is gone")

    made, gate = pipeline([1] * 8)
    gate.engine = Gone(lambda ids, key: [4])
    with pytest.raises(RunError, match="the engine is gone"):
        asyncio.run(asyncio.wait_for(steps_of(made, gate, 1), 5))


def test_a_group_that_somebody_else_cancels_is_told(pipeline):
    made, _ = pipeline([5000] * 8)

    async def run():
        await made.published(0)
        waiting = asyncio.create_task(made.next_rollouts(ScoreContext(step=1)))
        await asyncio.sleep(0.05)
        next(iter(made._tasks)).cancel()
        await asyncio.wait_for(waiting, 5)

    with pytest.raises(RunError, match="a group was cancelled, and not by the host"):
        asyncio.run(run())


def test_closing_ends_what_is_open_and_releases_what_it_holds(pipeline):
    agent = Slow()
    made, _ = pipeline([1, 1, 60_000, 60_000], agent=agent)

    async def run():
        await made.published(0)
        await made.next_rollouts(ScoreContext(step=1))
        await asyncio.wait_for(made.close(), 5)
        assert not made._tasks

    asyncio.run(run())
    assert sorted(agent.closed) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_resumed_run_draws_what_no_batch_had(pipeline):
    made, gate = pipeline([1, 1, 1, 1, 60_000, 1, 1, 1], depth=2)

    batches, state, finished = stopped_after(made, gate, 2)
    assert [indices for indices, _ in batches] == [[0, 1], [2, 3]]
    assert state["ordinal"] == 4
    assert made.admission.admitted == 10, "it had drawn further"
    assert sorted(finished) == [5, 6, 7, 8, 9], "all but the slow one"
    agent = Slow()
    again, gate = pipeline([1] * 8, depth=2, agent=agent)
    again.load_state_dict(state, finished)
    gate.engine.version = 2
    batches = asyncio.run(steps_of(again, gate, 4, first=2))
    assert [indices for indices, _ in batches] == [[4, 5], [6, 7], [0, 1], [2, 3]]
    assert batches[0][1] == {0, 2}, "what was finished is as it was, what was open was played again"
    assert set(agent.closed) == {4, 2, 3}


def test_groups_that_take_long_are_passed_until_their_deadline(pipeline):
    made, gate = pipeline([150, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], most=3)
    batches = asyncio.run(steps_of(made, gate, 6, train_s=0.01))
    assert [indices for indices, _ in batches[:3]] == [[1, 2], [3, 4], [5, 6]]
    assert batches[3][0] == [0, 7], "it was admitted under version 0, and may be three versions old"
    assert batches[3][1] == {0, 2}
    assert [indices for indices, _ in batches[4:]] == [[8, 9], [10, 11]]


def test_the_first_draw_may_be_the_first_one_that_is_over(pipeline):
    made, gate = pipeline([1, 100, 1, 100, 1, 1, 1, 1], most=3)
    batches = asyncio.run(steps_of(made, gate, 4, train_s=0.01))
    assert batches[0][0] == [0, 2]
    assert sorted(index for indices, _ in batches for index in indices) == [*range(8)]
    again, gate = pipeline([1, 100, 1, 100, 1, 1, 1, 1], most=3)
    again.load_state_dict(made.state_dict(), {})
    assert [indices for indices, _ in asyncio.run(steps_of(again, gate, 1, first=4))] == [[0, 2]]


def test_a_restored_group_of_another_task_is_played_again(pipeline):
    """The data changed, and has as many tasks as before."""
    made, gate = pipeline([1, 1, 60_000, 1, 1, 1], depth=2, steps=4)

    _, state, finished = stopped_after(made, gate, 1)
    assert sorted(finished) == [3, 4, 5, 6, 7]
    finished[3].group.task = replace(finished[3].group.task, prompt="34")
    finished[4].group.task = replace(finished[4].group.task, source="another")
    agent = Slow()
    again, gate = pipeline([1] * 6, depth=2, steps=4, agent=agent)
    again.load_state_dict(state, finished)
    gate.engine.version = 1
    asyncio.run(steps_of(again, gate, 3, first=1))
    assert sorted(agent.closed) == [2, 2, 3, 3, 4, 4]


def test_what_is_dropped_while_others_are_passed_is_counted_once(pipeline):
    class Odd:
        @hookimpl
        def keep_group(self, group):
            return True if group.task.index % 2 == 0 else Drop("odd")

    made, gate = pipeline([150, *[1] * 15], Odd(), most=3)
    batches, ledger = [], []

    async def run():
        await made.published(0)
        for step in range(1, 7):
            collected = await made.next_rollouts(ScoreContext(step=step))
            batches.append([group.task.index for group in collected.groups])
            ledger.extend(collected.draws)
            await gate.hold()
            gate.engine.version = step
            gate.release()
            await made.published(step)

    asyncio.run(run())
    assert [len(batch) for batch in batches] == [2] * 6
    assert 0 not in batches[0]
    assert sum(0 in batch for batch in batches[:4]) == 1
    numbers = [draw[0] for draw in ledger]
    assert len({*numbers}) == len(numbers)
    assert Counter(outcome for *_, outcome in ledger)["trained"] == 12
    assert all(outcome == ("trained" if index % 2 == 0 else "dropped: odd") for _, _, index, outcome in ledger)


def test_a_resumed_run_passes_over_what_batches_have(pipeline):
    made, gate = pipeline([60_000, *[1] * 7], most=3)

    batches, state, finished = stopped_after(made, gate, 2)
    assert [indices for indices, _ in batches] == [[1, 2], [3, 4]]
    assert (state["ordinal"], state["passed"], sorted(finished)) == (0, [1, 2, 3, 4], [5, 6, 7])
    agent = Slow()
    again, gate = pipeline([50, *[1] * 7], most=3, agent=agent)
    again.load_state_dict(state, finished)
    gate.engine.version = 2
    batches = asyncio.run(steps_of(again, gate, 4, train_s=0.1, first=2))
    assert sorted(index for indices, _ in batches for index in indices) == sorted([0, 5, 6, 7, 0, 1, 2, 3])
    assert batches[0][0] == [5, 6]
    assert set(agent.closed) == {0, 1, 2, 3}
    assert again.state_dict()["ordinal"] == 12


def test_memory_stays_flat_over_many_steps(pipeline):

    made, gate = pipeline([0] * 16, depth=2, steps=300)
    seen = {}

    async def run():
        await made.published(0)
        for step in range(1, 301):
            await made.next_rollouts(ScoreContext(step=step))
            await gate.hold()
            gate.engine.version = step
            gate.engine.calls.clear()
            gate.engine.expected.clear()
            gate.release()
            await made.published(step)
            if step in (100, 300):
                gc.collect()
                seen[step] = tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        asyncio.run(run())
    finally:
        tracemalloc.stop()
    assert seen[300] - seen[100] < 20_000, "bytes, in 200 steps of 4 episodes"


class Odd:
    @hookimpl
    def keep_group(self, group):
        return True if group.task.index % 2 else Drop("even")


def test_with_depth_0_draws_begin_in_advance_and_the_surplus_is_played_again_in_its_own_step(pipeline):
    """The first batch learns that half are dropped; the later ones begin twice as many, and take one round."""
    agent = Slow()
    made, _ = pipeline([100] * 48, Odd(), depth=0, steps=4, batch=4, agent=agent, threads=False)
    seconds, open_after, batches = [], [], []

    async def run():
        await made.published(0)
        for step in range(1, 5):
            started = time.monotonic()
            collected = await made.next_rollouts(ScoreContext(step=step))
            seconds.append(time.monotonic() - started)
            batches.append([group.task.index for group in collected.groups])
            open_after.append((len(made._open), len(made._tasks), len(made.collector.open)))
            await made.published(step)
        await made.close()

    virtual_time.run(run)
    assert batches == [[1, 3, 5, 7], [9, 11, 13, 15], [17, 19, 21, 23], [25, 27, 29, 31]]
    assert open_after == [(0, 0, 0)] * 4, "nothing is open after a step"
    assert max(seconds[1:]) < 0.3 < 0.1 * 5, "replacing one after the other takes 0.1 s at least four times"
    started = Counter(agent.closed)
    assert all(started[index] in (2, 4, 6) for index in range(32)), "every sample of every draw ended properly"


def test_a_checkpoint_s_finished_groups_survive_steps_of_depth_0(pipeline):
    deep, gate = pipeline([1] * 24, depth=3, steps=6)

    async def ahead():
        await deep.published(0)
        await deep.next_rollouts(ScoreContext(step=1))
        await asyncio.sleep(0.1)
        state, finished = deep.state_dict(), deep.finished()
        await deep.close()
        return state, finished

    state, finished = asyncio.run(ahead())
    assert sorted(finished) == [2, 3, 4, 5, 6, 7]
    made, gate = pipeline([1] * 24, depth=0, steps=6)
    made.load_state_dict(state, finished)
    made.admission.version = 1

    async def on():
        batches = []
        for step in range(2, 5):
            batches.append([group.task.index for group in (await made.next_rollouts(ScoreContext(step=step))).groups])
            await made.published(step)
            assert sorted(made.finished()) == [ordinal for ordinal in finished if ordinal >= made.state_dict()["ordinal"]]
        return batches

    assert asyncio.run(on()) == [[2, 3], [4, 5], [6, 7]]
    assert not gate.engine.calls, "none is played again"


def test_a_draw_that_is_ended_before_it_begins_is_not_expected_at_the_engine(pipeline):
    made, gate = pipeline([1] * 8)

    async def run():
        draw = made.stream.draw(1, 0)[0]
        task = made.collector.begin("train-0", draw, ScoreContext())
        assert gate.expected == 0
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(0)
        assert (gate.expected, made.collector.open) == (0, set())

    asyncio.run(run())


def test_a_draw_that_was_given_back_may_take_long_to_end(pipeline, monkeypatch):
    """Its number is drawn again meanwhile."""
    monkeypatch.setattr("rlhf_host.rollouts.pipeline.CLOSE_S", 0.01)

    class Lingers(Slow):
        @hookimpl
        async def agent_close(self, episode):
            await asyncio.sleep(0.2 * (episode.task.metadata["ms"] == 50))

    made, gate = pipeline([1, 1, 1, 1, 1, 50, 50, 50] * 4, Odd(), depth=0, steps=4, agent=Lingers())
    batches = asyncio.run(steps_of(made, gate, 4))
    assert [indices for indices, _ in batches] == [[1, 3], [5, 7], [9, 11], [13, 15]]
    assert (gate.expected, made.collector.open) == (0, set())
