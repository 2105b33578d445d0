"""Ray, DeepSpeed and vLLM together, through the real command line."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from rlhf_authoring.models import write_tiny_model

pytest.importorskip("ray")
pytest.importorskip("deepspeed")
pytest.importorskip("vllm")

pytestmark = pytest.mark.timeout(900)


def shared_memory():
    """What vLLM's processes share."""
    return [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("psm_") or "cpushm" in path.name]


@pytest.mark.parametrize("devices", [1, 2])
def test_sampler_and_trainer_agree_at_every_step(rlhf, tmp_path, devices):
    """By ipc, from one or two ranks to an engine over as many devices: with broadcast, the default, vLLM runs in test_nodes.py,
    with checkpoint in test_vllm.py."""
    before = set(shared_memory())
    more = [
        "--backend",
        "deepspeed",
        "--backend.zero-stage",
        "3",
        "--engine.tensor-parallel-size",
        str(devices),
        "--sync",
        "ipc",
    ]
    steps = trained(rlhf, tmp_path, *more, "--placement", f"actor={devices}", "--placement", f"rollout={devices}")
    assert steps[-1]["version"] == 3
    assert set(shared_memory()) <= before


def trained(rlhf, tmp_path, *more):
    """Three steps; returns their metrics."""
    model = write_tiny_model(tmp_path / "model", hidden=128)  # vLLM has no attention kernel for narrower heads on CPUs
    dice = random.Random(0)
    rows = [{"prompt": f"{dice.randint(1, 9)}+{dice.randint(1, 9)}=", "label": "7"} for _ in range(80)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        "algo": "rloo",
        "reward": "vowels",
        "actor.model": model,
        "actor.lr": "1e-3",
        "data": data,
        "rollout.n": "4",
        "rollout.max-new-tokens": "8",
        "train.batch-size": "8",
        "train.steps": "3",
        "runtime": "ray",
        "ray.num-cpus": "4",
        "ray.num-gpus": "0",
        "ray.object-store-mb": "200",
        "engine": "vllm",
        "checkpoint.final": "false",
        "run-dir": tmp_path / "run",
    }
    command = [part for name, value in flags.items() for part in (f"--{name}", value)]
    rlhf.run("train", *command, *more)
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert max(row["mismatch/max"] for row in steps) < 1e-4
    assert min(row["grad_norm"] for row in steps) > 0
    return steps
