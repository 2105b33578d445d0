"""The async face: which requests run together, when answers come, and what happens when something goes wrong."""

import asyncio
import threading
import time

import pytest

from rlhf_host.engines.plain_path import PlainKernels
from rlhf_host.engines.requests import Request
from rlhf_host.engines.transformers import Transformers
from rlhf_host.engines.waves import Waves
from rlhf_host.errors import RunError, UserError
from rlhf_host.protocols import EngineStart
from rlhf_host.records.episodes import Generation, Sampling
from rlhf_host.runtimes.compute import OneThread


class Recorder:
    """Stands where the decoder stands and keeps what it was given."""

    def __init__(self, seconds=0.0):
        self.batches, self.seconds = [], seconds

    def __call__(self, requests, finish, dropped):
        self.batches.append([request.key for request in requests])
        time.sleep(self.seconds)
        gone = dropped()
        if gone is True:
            return
        finish([(i, Generation([i], [0.0], [0], "stop")) for i in range(len(requests)) if i not in gone])


def request(*key):
    return Request((3,), Sampling(1), key)


async def episodes(waves, turns, delay=0.0):
    """One task an episode, ``turns[i]`` requests each; who is done says so, as the host does."""
    live = len(turns)

    async def run(i, count):
        nonlocal live
        for turn in range(count):
            await asyncio.sleep(delay * ((7 * i + 3 * turn) % 5))
            await waves.submit(request(i, turn))
        live -= 1
        waves.expect(live)

    waves.expect(live)
    await asyncio.gather(*(run(i, count) for i, count in enumerate(turns)))


@pytest.mark.parametrize("delay", [0.0, 0.01])
def test_batches_are_the_same_whatever_the_timing(delay):
    recorder = Recorder()

    async def main():
        waves = Waves(recorder, OneThread(), max_wait_s=30)
        await episodes(waves, [3, 1, 2, 3], delay)
        await waves.close()

    asyncio.run(main())
    assert recorder.batches == [[(0, 0), (1, 0), (2, 0), (3, 0)], [(0, 1), (2, 1), (3, 1)], [(0, 2), (3, 2)]]


def test_without_expectations_what_was_started_together_runs_together():
    recorder = Recorder()

    async def main():
        waves = Waves(recorder, OneThread(), max_wait_s=30)
        answers = await asyncio.gather(*(waves.submit(request(i)) for i in (2, 0, 1)))
        await waves.close()
        return answers

    answers = asyncio.run(main())
    assert recorder.batches == [[(0,), (1,), (2,)]]
    assert [answer.token_ids for answer in answers] == [[2], [0], [1]]


def test_a_missing_request_is_waited_for_only_so_long():
    recorder = Recorder()

    async def main():
        waves = Waves(recorder, OneThread(), max_wait_s=0.2)
        waves.expect(3)
        start = time.monotonic()
        await asyncio.gather(waves.submit(request(0)), waves.submit(request(1)))
        await waves.close()
        return time.monotonic() - start

    assert 0.2 <= asyncio.run(main()) < 5
    assert recorder.batches == [[(0,), (1,)]]


def test_the_wait_for_a_missing_request_begins_when_the_batch_before_has_ended():
    batches = []

    def run(requests, finish, dropped):
        batches.append([request.key for request in requests])
        finish([(0, Generation([0], [0.0], [0], "stop"))])
        time.sleep(0.5)
        finish([(i, Generation([i], [0.0], [0], "stop")) for i in range(1, len(requests))])

    async def main():
        waves = Waves(run, OneThread(), max_wait_s=0.3)
        await episodes(waves, [2, 2], delay=0.01)
        await waves.close()

    asyncio.run(main())
    assert batches == [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]


def test_the_event_loop_stays_free_while_decoding():
    released = threading.Event()

    def run(requests, finish, dropped):
        assert released.wait(30)
        finish([(0, Generation([0], [0.0], [0], "stop"))])

    async def main():
        waves = Waves(run, OneThread(), max_wait_s=30)
        pending = asyncio.create_task(waves.submit(request(0)))
        await asyncio.sleep(0.01)
        assert not pending.done()
        released.set()
        await pending
        await waves.close()

    asyncio.run(main())


def test_a_cancelled_request_leaves_and_the_others_are_answered():
    recorder = Recorder(seconds=0.2)

    async def main():
        waves = Waves(recorder, OneThread(), max_wait_s=30)
        tasks = [asyncio.create_task(waves.submit(request(i))) for i in range(3)]
        await asyncio.sleep(0.05)
        tasks[1].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        waves.expect(2)
        waiting = asyncio.create_task(waves.submit(request(9)))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        left = list(waves._waiting)
        await waves.close()
        return results, left

    results, left = asyncio.run(main())
    assert [type(result).__name__ for result in results] == ["Generation", "CancelledError", "Generation"]
    assert recorder.batches == [[(0,), (1,), (2,)]]
    assert left == []


def test_an_error_reaches_everyone_who_waits_and_the_next_batch_runs():
    broken, running, asked = True, threading.Event(), threading.Event()

    def run(requests, finish, dropped):
        if broken:
            running.set()
            asked.wait(10)
            raise RunError("out of order")
        Recorder()(requests, finish, dropped)

    async def main():
        nonlocal broken
        waves = Waves(run, OneThread(), max_wait_s=0.5)
        first = [asyncio.create_task(waves.submit(request(i))) for i in range(2)]
        while not running.is_set():
            await asyncio.sleep(0.001)
        waves.expect(5)
        late = asyncio.create_task(waves.submit(request(7)))
        await asyncio.sleep(0.001)
        asked.set()
        failures = await asyncio.gather(*first, late, return_exceptions=True)
        broken = False
        waves.expect(0)
        answer = await waves.submit(request(8))
        await waves.close()
        return failures, answer

    failures, answer = asyncio.run(main())
    assert [str(failure) for failure in failures] == ["out of order"] * 3
    assert answer.finish_reason == "stop"


def test_closing_fails_what_is_pending_and_ends_the_wave():
    async def main():
        waves = Waves(Recorder(seconds=0.2), OneThread(), max_wait_s=30)
        running = asyncio.create_task(waves.submit(request(0)))
        await asyncio.sleep(0.05)
        waves.expect(4)
        waiting = asyncio.create_task(waves.submit(request(1)))
        await asyncio.sleep(0.05)
        await waves.close()
        results = await asyncio.gather(running, waiting, return_exceptions=True)
        with pytest.raises(RunError, match="closed"):
            await waves.submit(request(2))
        await waves.close()
        return results, waves._server

    results, server = asyncio.run(main())
    assert all(isinstance(result, RunError) and "closed" in str(result) for result in results)
    assert server.done()


# --- the engine behind it -----------------------------------------------------------------------


def test_many_episodes_in_flight_get_what_a_batch_gives(llama):
    requests = [Request((3, 5 + i % 3), Sampling(4 + i), (i,)) for i in range(20)]

    async def main():
        engine = engine_for(llama)
        engine.expect(20)
        together = await asyncio.gather(*(engine.generate(list(r.token_ids), r.sampling, r.key) for r in reversed(requests)))
        engine.expect(0)
        alone = []
        for r in requests:
            alone.append(await engine.generate(list(r.token_ids), r.sampling, r.key))
        await engine.close()
        return together[::-1], alone

    together, alone = asyncio.run(main())
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert [one.finish_reason for one in together] == [one.finish_reason for one in alone]


def engine_for(model):
    start = EngineStart(model=model, tokenizer=None, version=0, compute=OneThread(), kernels=PlainKernels())
    return Transformers(Transformers.Options()).start(start)


def watch_forwards(engine, told):
    """Call ``told(rows)`` in every forward pass, and slow it down."""

    def watch(module, args, out):
        told(len(args[0]))
        time.sleep(0.005)

    return engine.model.model.embed_tokens.register_forward_hook(watch)


def test_answers_come_as_rows_finish(llama):
    llama.generation_config.eos_token_id = None

    async def main():
        engine = engine_for(llama)
        await engine.generate([3, 5], Sampling(90), (0,))
        hook = watch_forwards(engine, lambda rows: None)
        tasks = [asyncio.create_task(engine.generate([3, 5], Sampling(90 if i % 2 else 2), (i,))) for i in range(6)]
        await asyncio.gather(*tasks[::2])
        early = [task.done() for task in tasks]
        await asyncio.gather(*tasks)
        hook.remove()
        await engine.close()
        return early

    assert asyncio.run(main()) == [True, False] * 3


def test_a_bad_prompt_is_its_own_callers_error(llama):
    async def main():
        engine = engine_for(llama)
        good, bad = await asyncio.gather(
            engine.generate([3], Sampling(2), (0,)), engine.generate([], Sampling(2), (1,)), return_exceptions=True
        )
        await engine.close()
        return good, bad

    good, bad = asyncio.run(main())
    assert isinstance(good, Generation)
    assert isinstance(bad, UserError)


def test_a_cancelled_episode_leaves_the_running_batch(llama):
    llama.generation_config.eos_token_id = None

    async def main():
        engine = engine_for(llama)
        await engine.generate([3, 5], Sampling(60), (0,))
        loop, running, sizes = asyncio.get_running_loop(), asyncio.Event(), []

        def told(rows):
            sizes.append(rows)
            if len(sizes) == 3:
                loop.call_soon_threadsafe(running.set)

        hook = watch_forwards(engine, told)
        tasks = [asyncio.create_task(engine.generate([3, 5], Sampling(60), (i,))) for i in range(4)]
        await running.wait()
        tasks[2].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        hook.remove()
        await engine.close()
        return sizes, results

    sizes, results = asyncio.run(main())
    assert sizes[:3] == [1, 4, 4]
    assert sizes[-1] == 3
    assert [isinstance(result, Generation) for result in results] == [True, True, False, True]


def test_asking_who_is_gone_does_not_look_at_every_request():
    """A decoder asks after each token."""
    steps, requests, looked = 200, 4_000, 0

    class Looked(asyncio.Future):
        def cancelled(self):
            nonlocal looked
            looked += 1
            return super().cancelled()

    def run(given, finish, dropped):
        for _ in range(steps):
            dropped()
        Recorder()(given, finish, dropped)

    async def main():
        loop = asyncio.get_running_loop()
        loop.create_future = lambda: Looked(loop=loop)
        waves = Waves(run, OneThread(), 5.0)
        waves.expect(requests)
        answers = await asyncio.gather(*(waves.submit(request(number)) for number in range(requests)))
        await waves.close()
        return len(answers)

    assert asyncio.run(main()) == requests
    assert looked <= 4 * requests
