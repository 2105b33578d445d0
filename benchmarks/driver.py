"""The controller's own time per trajectory, with engines that answer at once: rollout bookkeeping, scoring, tensors, advantages.

    python benchmarks/driver.py [--sizes 1000 10000 100000] [--json]
    python benchmarks/driver.py --runtime ray [--engines 2]

Eight samples a prompt, eight tokens each, RLOO and ``math_verifier``. What must not happen is a time per trajectory that grows
with the batch: ``growth`` is the largest size's over the smallest's. On Ray the engines are actors and the batch is dealt out
over two ranks (``update``); ``CPU`` is what this process computed, in all its threads, without what
it waited for.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rlhf_authoring.engines import ScriptedEngine

from rlhf_host.config.resolve import resolve
from rlhf_host.config.schema import PluginChoice, RunConfig
from rlhf_host.data.arithmetic import ArithmeticTasks, character_tokenizer
from rlhf_host.data.stream import Draw
from rlhf_host.records.episodes import Sampling, Task
from rlhf_host.records.needs import ScoreContext
from rlhf_host.rollouts.collect import Collector
from rlhf_host.rollouts.episode_settings import EpisodeSettings, SampledModel
from rlhf_host.rollouts.episodes import Episodes
from rlhf_host.rollouts.experience import apply_rewards, make_experience
from rlhf_host.rollouts.gate import Gate
from rlhf_host.training.events import EventLoop

SAMPLES = 8
RANKS = 2

Answers = dict[tuple[int, ...], list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 10000, 100000], help="trajectories per step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runtime", choices=["local", "ray"], default="local")
    parser.add_argument("--engines", type=int, default=2, help="on Ray")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = character_tokenizer()
    config = RunConfig(algo=PluginChoice(name="rloo"), reward={"math_verifier": {"name": "math_verifier"}}, tracker={})
    manager = resolve(config).plugins()
    tasks = [
        dataclasses.replace(task, prompt_ids=tuple(tokenizer(task.prompt)["input_ids"]), index=index, source="sums")
        for index, task in enumerate(list(ArithmeticTasks(ArithmeticTasks.Options()).load_tasks("train", 0))[:1000])
    ]
    answers = {task.prompt_ids: [*tokenizer(task.ground_truth)["input_ids"], tokenizer.eos_token_id] for task in tasks}
    with local(answers) if options.runtime == "local" else on_ray(answers, options.engines) as (engine, update):
        episodes = Episodes(
            manager,
            SampledModel(engine=Gate(engine), tokenizer=tokenizer),
            EpisodeSettings(sampling=Sampling(8), max_tokens=64),
        )
        collector = Collector(episodes, n=SAMPLES, seed=0, split="train")
        events = EventLoop()

        def step(size: int) -> dict[str, float]:
            drawn = cycle(tasks)
            computed, started = time.process_time(), time.perf_counter()
            collected = events.run(
                collector.fill(lambda count: [Draw(next(drawn), 0) for _ in range(count)], size // SAMPLES, ScoreContext())
            )
            rolled = time.perf_counter()
            experience = make_experience(collected.groups, {"math_verifier": 1.0}, step=1, max_new_tokens=8, temperature=1.0)
            made = time.perf_counter()
            apply_rewards(experience, manager)
            experience.advantages = manager.one("compute_advantages", experience=experience).advantages
            judged = time.perf_counter()
            update(experience)
            done = time.perf_counter()
            cpu = time.process_time() - computed
            parts = {
                "rollout": rolled - started,
                "tensors": made - rolled,
                "advantages": judged - made,
                "update": done - judged,
            }
            return {**parts, "all": done - started, "CPU": cpu}

        results = {}
        step(options.sizes[0])
        for size in options.sizes:
            rounds = [step(size) for _ in range(options.rounds)]
            results[size] = {phase: statistics.median(r[phase] for r in rounds) / size * 1e6 for phase in rounds[0]}
            told = ", ".join(f"{phase} {value:.1f} µs" for phase, value in results[size].items())
            print(f"{size:>7} trajectories: {told}", flush=True)
        events.close()
    growth = {what: results[options.sizes[-1]][what] / results[options.sizes[0]][what] for what in ("all", "CPU")}
    print(f"growth of the time per trajectory: {growth['all']:.2f}, of the CPU time {growth['CPU']:.2f}")
    if options.json:
        print(json.dumps({"growth": round(growth["all"], 3), "growth_cpu": round(growth["CPU"], 3), "microseconds": results}))
    manager.close()


@contextmanager
def local(answers: Answers) -> Iterator[tuple[Any, Any]]:
    """An engine in this process, and what happens to a batch."""
    yield scripted(answers), lambda experience: None


@contextmanager
def on_ray(answers: Answers, count: int) -> Iterator[tuple[Any, Any]]:
    """Engines and ranks as the Ray runtime has them, but that what they would compute is there at once."""
    from rlhf_host.distributed.ray.actors import EngineActor
    from rlhf_host.distributed.ray.cluster import RayCluster
    from rlhf_host.distributed.ray.engine_pool import EnginePool
    from rlhf_host.distributed.ray.plugin import Ray
    from rlhf_host.distributed.ray.worker_group import RemoteTrainer, WorkerGroup
    from rlhf_host.protocols import EngineTraits
    from rlhf_host.training.reduction import Metrics
    from rlhf_host.training.worker import Update

    class Engine(EngineActor):
        def __init__(self, answers: Answers):
            super().__init__()
            self.engine = scripted(answers)

    class Rank:
        def update(self, shard: Any, whole: Any, sampled_now: bool) -> tuple[Update, float]:
            return Update(Metrics()), 0.0

    cluster = RayCluster(Ray.Options(num_cpus=count + RANKS, num_gpus=0, object_store_mb=1000))
    cluster.start()
    try:
        import ray

        engines = [ray.remote(Engine).options(num_cpus=1, max_concurrency=10_000).remote(answers) for _ in range(count)]
        arguments = (None, 1, None)
        pool = EnginePool([(str(number), engine, arguments) for number, engine in enumerate(engines)], EngineTraits())
        pool.lives.start(ray.get([engine.start.remote(*arguments) for engine in engines]))
        pool.synced(0)
        ranks = [ray.remote(Rank).options(num_cpus=1).remote() for _ in range(RANKS)]
        yield pool, RemoteTrainer([WorkerGroup("actor", ranks, ("actor",), ("actor",))], unit_rows=False).update
    finally:
        cluster.stop()


def scripted(answers: Answers) -> ScriptedEngine:
    """It keeps nothing of what it was asked."""
    return ScriptedEngine(lambda ids, key: answers[tuple(ids)], calls=deque(maxlen=0), expected=deque(maxlen=0))  # type: ignore[arg-type]


def cycle(tasks: list[Task]) -> Iterator[Task]:
    while True:
        yield from tasks


if __name__ == "__main__":
    main()
