"""Work of the controller on one rollout of many tokens: records, tensors, advantages, and rows for ranks.

    python benchmarks/controller.py [--trajectories N] [--mean TOKENS] [--longest TOKENS] [--ranks N ...]

Trajectories of lognormal length, in groups of 8; no model and no Ray. A reference's and the old log-probabilities are made up, and
PPO's and RLOO's advantages computed. ``passes`` and ``update`` are what ``ray.put`` does with every rank's rows: pickling, and a
copy of each buffer. Seconds are those of the processor, which other work on the machine disturbs less. Memory is that of the
process: what the records hold (``held``), and the peak above that, of everything up to the line.
"""

from __future__ import annotations

import argparse
import gc
import json
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from rlhf_plugin_ppo import PPO
from rlhf_plugin_ppo import Options as PPOOptions
from rlhf_plugin_rloo import RLOO
from rlhf_plugin_rloo import Options as RLOOOptions

from rlhf_host.distributed.ray.batch_shards import PASSES, UPDATES, deal_rows, make_shards
from rlhf_host.functional import kl_estimate
from rlhf_host.records.episodes import Group, Segment, Task, Trajectory
from rlhf_host.records.numbers import Numbers
from rlhf_host.records.tensors import Experience
from rlhf_host.rollouts.experience import make_experience
from rlhf_host.training.reduction import Denominators

PROMPT = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=4096)
    parser.add_argument("--mean", type=int, default=1_500, help="tokens of a trajectory, before the longest are cut")
    parser.add_argument("--longest", type=int, default=8_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 128, 1024])
    options = parser.parse_args()
    start = resident()
    groups, tokens = rollout(options.trajectories, options.mean, options.longest)
    result = {"trajectories": options.trajectories, "tokens": tokens, "longest": options.longest}
    result["held_bytes_per_token"] = (resident() - start) / tokens
    result["held_gb"] = (resident() - start) / 1e9
    start = resident()
    with timed(result, "tensors_s"):
        experience = make_experience(groups, {}, step=1, max_new_tokens=options.longest, temperature=1.0)
        add_columns(experience)
    for name, plugin in (("rloo", RLOO(RLOOOptions())), ("ppo", PPO(PPOOptions()))):
        experience.advantages = experience.returns = None
        with timed(result, f"{name}_s"):
            answer = plugin.compute_advantages(experience)
        experience.advantages, experience.returns = answer.advantages, answer.returns
        del answer
        result[f"{name}_peak_gb"] = (peak() - start) / 1e9
    with timed(result, "denominators_s"):
        result["denominators_mb"] = put(Denominators.of(experience)) / 1e6
    for ranks in options.ranks:
        with timed(result, f"deal_{ranks}_s"):
            rows = deal_rows(experience, ranks, unit_rows=False)
        for name, fields in (("passes", PASSES), ("update", UPDATES)):
            with timed(result, f"{name}_{ranks}_s"):
                result[f"{name}_{ranks}_mb"] = sum(map(put, make_shards(experience, rows, fields))) / 1e6
        result[f"all_{ranks}_s"] = sum(result[f"{part}_{ranks}_s"] for part in ("deal", "passes", "update"))
    result["peak_with_shards_gb"] = (peak() - start) / 1e9
    for name, value in result.items():
        print(f"{name:>22}  {value:,.2f}")
    print(json.dumps(result))


def add_columns(experience: Experience) -> None:
    """Adds what other roles compute, and a KL as shaped rewards."""
    noise = torch.where(experience.action_mask, experience.sampler_logprobs * 0.9, 0.0)
    experience.logprobs["reference"] = experience.old_logprobs = experience.values["critic"] = noise
    kl = kl_estimate(experience.sampler_logprobs, noise, experience.action_mask, "k3")
    experience.shaped = -0.01 * kl


def rollout(count: int, mean: int, longest: int) -> tuple[list[Group], int]:
    """Groups as an engine and the episodes leave them, and how many tokens were sampled."""
    dice = np.random.default_rng(0)
    lengths = dice.lognormal(np.log(mean) - 0.5, 1.0, count).clip(1, longest).astype(int)
    groups = []
    for number in range(count // 8):
        task = Task("task", index=number, prompt_ids=tuple(dice.integers(0, 150_000, PROMPT).tolist()))
        rows = []
        for sample in range(8):
            length = int(lengths[8 * number + sample])
            ids, logprobs = dice.integers(0, 150_000, length, np.int32), dice.random(length, np.float32)
            versions = np.full(length, 3, np.int32)
            segments = [
                Segment("prompt", Numbers("i", task.prompt_ids or ())),
                Segment("action", *(Numbers(x.dtype.char, x.tobytes()) for x in (ids, logprobs, versions))),
            ]
            rows.append(
                Trajectory(f"{number}/{sample}", str(number), task, segments, sample=sample, reward=float(dice.random()))
            )
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
    started = time.process_time()
    yield
    result[name] = time.process_time() - started


def resident() -> int:
    """Bytes."""
    gc.collect()
    return _status("VmRSS")


def peak() -> int:
    """Bytes, since the process began."""
    return _status("VmHWM")


def _status(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
