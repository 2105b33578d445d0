"""What the vLLM engine says of itself, without vLLM."""

import asyncio
import threading
import time
from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from rlhf_host.distributed.vllm.engine import STEP_S, VLLMEngine
from rlhf_host.distributed.vllm.measures import Measures
from rlhf_host.distributed.vllm.requests import Sent
from rlhf_host.engines.requests import Request
from rlhf_host.errors import RunError
from rlhf_host.records.episodes import Sampling


@pytest.mark.parametrize(
    ("core_died", "failure", "step_s", "closed", "dead"),
    [
        (True, None, None, False, True),
        (False, None, None, False, False),
        (False, RuntimeError("a step failed"), None, False, True),
        (False, None, 5.0, False, False),
        (False, None, 2 * STEP_S, False, True),
        (True, None, None, True, False),
    ],
)
def test_an_engine_tells_that_its_core_died_or_was_stopped_in_a_step(core_died, failure, step_s, closed, dead):
    engine = object.__new__(VLLMEngine)
    engine.multiprocess, engine._failure, engine._closed = True, failure, closed
    engine._step_began = None if step_s is None else time.perf_counter() - step_s
    engine.llm = SimpleNamespace(engine_core=SimpleNamespace(resources=SimpleNamespace(engine_dead=core_died)))
    assert engine.dead is dead


class Scripted(VLLMEngine):
    """Its thread's own loop, over a core that does what a script says."""

    def __init__(self, **core):
        self.multiprocess, self._failure, self._closed, self._step_began, self.busy_s = True, None, False, None, 0.0
        self._asked, self._actions, self._running, self._condition = deque(), deque(), {}, threading.Condition()
        self._thread, self._measures, self._core, self._processor = None, Measures(), None, None
        self._shared, self._scratch, self.version = set(), SimpleNamespace(close=lambda: None), 0
        self.llm = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: None), **core)

    def _start(self, start):
        pass

    def play(self):
        self._work(None, Future())


def test_what_waits_behind_an_action_that_ends_the_engine_hears_of_it():
    def die():
        raise RuntimeError("the core is gone")

    engine = Scripted()
    engine._post(die)
    waiting = [engine._submit(lambda: None), engine._submit(lambda: None)]
    engine.play()
    for future in waiting:
        with pytest.raises(RunError, match="engine vllm died: the core is gone"):
            future.result(timeout=1)


def test_answers_of_a_step_that_fails_while_they_are_read_are_not_lost():
    async def run():
        loop = asyncio.get_running_loop()
        calls = [Sent(Request((5,), Sampling(8), (0, 0, 0)), loop) for _ in range(2)]
        outputs = [SimpleNamespace(finished=True, request_id=str(number)) for number in range(2)]  # without tokens
        engine = Scripted(step=lambda: outputs)
        engine._running = {"0": calls[0], "1": calls[1]}
        await asyncio.to_thread(engine.play)
        for call in calls:
            with pytest.raises(RunError, match="engine vllm died"):
                await asyncio.wait_for(call.future, 1)

    asyncio.run(run())


@pytest.fixture(autouse=True)
def newest(monkeypatch):
    """Whatever vLLM is installed."""
    monkeypatch.setattr("rlhf_host.distributed.vllm.engine.versions_by_token", lambda: True)


def sleeping(done, *, adapter_rank=0, **extra):
    """An engine whose core frees memory, as on a GPU."""
    engine = Scripted(
        sleep=lambda level: done.append(f"sleep {level}"),
        wake_up=lambda tags: done.append(f"wake {tags}"),
        reset_prefix_cache=lambda **_: True,
        set_weight_version=lambda version: done.append(f"version {version}"),
    )
    engine.multiprocess, engine.asleep, engine._room, engine._can_sleep = False, False, False, True
    engine._adapter_rank, engine.options = adapter_rank, SimpleNamespace(kv_after_sync="recompute", extra=extra)
    engine._submit = lambda action: settled(action)
    return engine


def settled(action):
    future = Future()
    future.set_result(action())
    return future


def test_on_gpus_it_sleeps_without_weights_and_wakes_for_them_first():
    """At level 2 vLLM keeps neither weights nor cache."""
    done = []
    engine = sleeping(done)

    async def turns():
        await engine.sleep_empty()
        await engine.sleep_empty()
        assert engine.version == -1
        with pytest.raises(RunError, match="asleep: wake"):
            engine._load(lambda: done.append("load"), 7)
        await engine.wake_weights()
        await engine.wake_weights()
        engine._load(lambda: done.append("load"), 7)
        with pytest.raises(RunError, match="asleep"):
            engine._check_ready()
        await engine.wake()
        engine._check_ready()

    asyncio.run(turns())
    assert done == ["sleep 2", "wake ['weights']", "load", "version 7", "wake ['kv_cache']"]


def test_features_of_older_weights_are_forgotten():
    """vLLM keeps the features of pictures by their content, which new weights do not change."""
    done = []
    engine = sleeping(done)
    engine.llm.reset_encoder_cache = lambda: done.append("no features")
    engine._take_version(1)
    engine._processor = object()
    engine._take_version(2)
    assert done == ["version 1", "no features", "version 2"]


@pytest.mark.parametrize("settings", [{"adapter_rank": 8}, {"speculative_config": {"method": "eagle", "model": "draft"}}])
def test_it_keeps_weights_that_no_sync_brings(settings):
    """Those of an adapter's base, and of a draft model."""
    done = []
    engine = sleeping(done, **settings)

    async def turns():
        await engine.sleep_empty()
        await engine.wake()
        await engine.sleep()
        await engine.wake()

    asyncio.run(turns())
    assert (engine.version, done) == (0, ["sleep 1", "wake None"] * 2)
