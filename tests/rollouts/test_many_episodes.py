"""Two thousand episodes at once, with everything that environments do wrong: each ends in one way, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import random
import resource
import threading
import time
from collections import Counter

from rlhf_host import EpisodeFailed, Step, hookimpl
from rlhf_host.config.schema import RolloutConfig
from rlhf_host.records.metric_names import MetricNames
from rlhf_host.rollouts.policy import Expected

from . import virtual_time
from .playing import load

EPISODES, STEP_TIMEOUT_S = 2000, 3.0


class Unreliable:
    """Plays 1 to 10 turns; what goes wrong, and when, is fixed by the episode."""

    FAULTS = ("raise", "hang", "wrong type", "gives up", "nothing")

    def __init__(self):
        self.open, self.ended = set(), Counter()

    @hookimpl
    async def agent_reset(self, episode):
        rng = random.Random(f"{episode.seed}-{episode.sample}")
        turns = rng.randint(1, 10)
        fault = rng.choice(self.FAULTS) if rng.random() < 0.2 else None
        episode.state = (turns, rng.randrange(turns), fault, rng.random() < 0.05)
        self.open.add(episode.episode_id)
        self.ended[fault or "finished"] += 1
        return Step("go:")

    @hookimpl
    async def agent_step(self, episode, action):
        turns, when, fault, slow = episode.state
        if slow:
            await asyncio.sleep(0.01)
        if fault is not None and episode.turn == when:
            match fault:
                case "raise":
                    raise ConnectionResetError("the sandbox is gone")
                case "hang":
                    await asyncio.sleep(3600)
                case "wrong type":
                    return {"observation": "again"}
                case "gives up":
                    raise EpisodeFailed("no machine is free")
                case "nothing":
                    return Step()
        done = episode.turn == turns - 1
        return Step(None if done else "again ", reward=1.0, done=done)

    @hookimpl
    async def agent_close(self, episode):
        self.open.discard(episode.episode_id)


def test_every_episode_ends_in_exactly_one_way(collect):
    settings = RolloutConfig(step_timeout_s=STEP_TIMEOUT_S, episode_retries=0)

    def timed(work):
        async def timed_work():
            started = time.monotonic()
            found = await work()
            times[:] = [time.monotonic() - started]
            return found

        return virtual_time.run(timed_work)

    times: list[float] = []

    def play():
        agent = Unreliable()
        threads = threading.active_count()
        # "go:" and ten turns of an answer and "again ": all fit.
        found, engine = collect(
            load(agent=agent, threads=False),
            groups=EPISODES // 8,
            n=8,
            settings=settings,
            max_tokens=512,
            script=lambda ids, key: [5, 6],
            play=timed,
        )
        [took] = times
        assert threading.active_count() <= threads + 2
        return found, engine, agent, took

    found, engine, agent, took = play()
    metrics = found.metrics(MetricNames("filters"))
    states = {name: int(metrics[f"rollout/{name}"]) for name in ("finished", "truncated", "failed")}
    print(states, {name: value for name, value in metrics.items() if "failed/" in name}, f"{took:.1f} s")
    assert sum(states.values()) == EPISODES == agent.ended.total()
    assert states["finished"] == agent.ended["finished"] == found.trajectories
    kinds = {"ConnectionResetError": "raise", "TimeoutError": "hang"}
    for kind, fault in kinds.items():
        assert metrics[f"rollout/failed/single_turn:{kind}"] == agent.ended[fault] > 0
    assert metrics["rollout/failed/single_turn:TypeError"] == agent.ended["wrong type"] + agent.ended["nothing"]
    assert found.failed["no machine is free"] == agent.ended["gives up"]
    assert not agent.open, "every episode is closed"
    assert engine.expected[-1] == 0
    assert STEP_TIMEOUT_S <= took < 2 * STEP_TIMEOUT_S, "hangs cost their deadline once, not once each"
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    play()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000, "KiB: a second time needs no more memory"


def test_a_call_that_outlives_its_episode_is_counted_no_more():
    """Engines would wait for one episode too few from then on."""
    changes: list[int] = []

    async def main():
        expected = Expected(changes.append, next_s=0.01)
        expected.wait(1.0)
        with expected.asking():
            expected.close()
        await asyncio.sleep(0.1)

    asyncio.run(main())
    assert changes == [1, -1]
