"""What the controller does with one rollout of many tokens: memory that records hold, tensors from them, and dealing to ranks.

    python benchmarks/controller.py [TRAJECTORIES] [MEAN_TOKENS] [RANKS]

Trajectories of lognormal length, in groups of 8, at most 8,000 tokens each; no model and no Ray. A pass is what ``ray.put`` does
with every rank's rows: pickling, and a copy of each buffer.
"""

from __future__ import annotations

import gc
import json
import pickle
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from rlhf_host.records.episodes import Group, Segment, Task, Trajectory
from rlhf_host.records.numbers import Numbers
from rlhf_host.rollouts.experience import make_experience
from rlhf_host.runtimes.batch_shards import PASSES, UPDATES, deal_rows, make_shards

LONGEST = 8_000
PROMPT = 200


def main() -> None:
    count, mean, ranks = (int(text) for text in (*sys.argv[1:], *("4096", "1500", "8")[len(sys.argv) - 1 :]))
    before = resident()
    groups, tokens = rollout(count, mean)
    result = {"trajectories": count, "tokens": tokens, "held_bytes_per_token": (resident() - before) / tokens}
    with timed(result, "tensors_s"):
        experience = make_experience(groups, {}, step=1, max_new_tokens=LONGEST, temperature=1.0)
    shape = experience.action_mask.shape
    experience.advantages, experience.logprobs["reference"] = torch.zeros(shape), torch.zeros(shape)
    with timed(result, "deal_s"):
        rows = deal_rows(experience, ranks, unit_rows=False)
    for name, fields in (("passes", PASSES), ("update", UPDATES)):
        with timed(result, f"{name}_s"):
            result[f"{name}_mb"] = sum(map(put, make_shards(experience, rows, fields))) / 1e6
    for name, value in result.items():
        print(f"{name:>22}  {value:,.2f}")
    print(json.dumps(result))


def rollout(count: int, mean: int) -> tuple[list[Group], int]:
    """Groups as an engine and the episodes leave them, and how many tokens were sampled."""
    dice = np.random.default_rng(0)
    lengths = dice.lognormal(np.log(mean) - 0.5, 1.0, count).clip(1, LONGEST).astype(int)
    groups = []
    for number in range(count // 8):
        task = Task("task", index=number, prompt_ids=tuple(dice.integers(0, 150_000, PROMPT).tolist()))
        rows = []
        for sample in range(8):
            length = int(lengths[8 * number + sample])
            ids, logprobs = dice.integers(0, 150_000, length).tolist(), dice.random(length, np.float32).tolist()
            segments = [
                Segment("prompt", Numbers("i", task.prompt_ids or ())),
                Segment("action", Numbers("i", ids), Numbers("f", logprobs), Numbers("i", [3] * length)),
            ]
            rows.append(Trajectory(f"{number}/{sample}", str(number), task, segments, sample=sample, reward=1.0))
        groups.append(Group(str(number), task, rows))
    return groups, int(lengths.sum())


def put(shard: Any) -> int:
    """Bytes that go to the object store."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(shard, protocol=5, buffer_callback=buffers.append)
    return len(head) + sum(len(bytes(buffer.raw())) for buffer in buffers)


@contextmanager
def timed(result: dict[str, float], name: str) -> Iterator[None]:
    gc.collect()
    started = time.perf_counter()
    yield
    result[name] = time.perf_counter() - started


def resident() -> int:
    """Bytes."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


if __name__ == "__main__":
    main()
