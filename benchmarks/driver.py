"""The controller's own time per trajectory, with engines that answer at once: rollout bookkeeping, scoring, tensors, advantages.

    python benchmarks/driver.py [--sizes 1000 10000 100000] [--json]

Eight samples a prompt, eight tokens each, RLOO and ``math_verifier``. What must not happen is a time per trajectory that grows
with the batch: ``growth`` is the largest size's over the smallest's.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Iterator

import torch

from rlhf_host.config.plan import build_plugins
from rlhf_host.config.schema import DataConfig, PluginChoice, RolloutConfig, RunConfig
from rlhf_host.data.arithmetic import ArithmeticTasks, character_tokenizer
from rlhf_host.rollouts.collect import Collector, Draw
from rlhf_host.rollouts.episodes import Episodes
from rlhf_host.rollouts.experience import apply_rewards, make_experience
from rlhf_host.testing.engines import ScriptedEngine
from rlhf_host.training.eventloop import EventLoop
from rlhf_host.types import Sampling, ScoreContext, Task

SAMPLES = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 10000, 100000], help="trajectories per step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = character_tokenizer()
    config = RunConfig(
        algo=PluginChoice(plugin="rloo"), reward={"math_verifier": PluginChoice(plugin="math_verifier")}, tracker={}
    )
    manager = build_plugins(config)
    tasks = [
        dataclasses.replace(task, prompt_ids=tuple(tokenizer(task.prompt)["input_ids"]), index=index, source="sums")
        for index, task in enumerate(list(ArithmeticTasks(ArithmeticTasks.Options()).load_tasks("train", 0))[:1000])
    ]
    answers = {task.prompt_ids: [*tokenizer(task.ground_truth)["input_ids"], tokenizer.eos_token_id] for task in tasks}
    engine = ScriptedEngine(lambda ids, key: answers[tuple(ids)])
    episodes = Episodes(manager, engine, tokenizer, DataConfig(), Sampling(8), 64)
    collector = Collector(episodes, manager, RolloutConfig(), n=SAMPLES, seed=0, split="train")
    events = EventLoop()
    gc.collect()
    gc.freeze()

    def step(size: int) -> dict[str, float]:
        engine.calls.clear()
        drawn = cycle(tasks)
        started = time.perf_counter()
        collected = events.run(collector.fill(lambda: Draw(next(drawn), 0), size // SAMPLES, ScoreContext()))
        rolled = time.perf_counter()
        experience = make_experience(collected.groups, {"math_verifier": 1.0}, step=1, max_new_tokens=8, temperature=1.0)
        made = time.perf_counter()
        apply_rewards(experience, manager)
        manager.one("compute_advantages", experience=experience)
        done = time.perf_counter()
        return {"rollout": rolled - started, "tensors": made - rolled, "advantages": done - made, "all": done - started}

    step(options.sizes[0])
    results = {}
    for size in options.sizes:
        rounds = [step(size) for _ in range(options.rounds)]
        results[size] = {phase: statistics.median(r[phase] for r in rounds) / size * 1e6 for phase in rounds[0]}
        print(f"{size:>7} trajectories: " + ", ".join(f"{phase} {value:.1f} µs" for phase, value in results[size].items()))
    growth = results[options.sizes[-1]]["all"] / results[options.sizes[0]]["all"]
    print(f"growth of the time per trajectory: {growth:.2f}")
    if options.json:
        print(json.dumps({"growth": round(growth, 3), "microseconds": results}))
    events.close()
    manager.close()


def cycle(tasks: list[Task]) -> Iterator[Task]:
    while True:
        yield from tasks


if __name__ == "__main__":
    main()
