"""A cluster that grows from no GPU: a run waits for what it asked for, and takes CPUs only if it is told to."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from .clusters import held

pytest.importorskip("ray")

CLUSTER = """
import sys
from ray.cluster_utils import Cluster

machine = {"object_store_memory": 100 * 2**20, "node_ip_address": "127.0.0.1"}
cluster = Cluster(initialize_head=True, head_node_args=dict(machine, num_cpus=2, num_gpus=0, include_dashboard=False))
print(cluster.address, flush=True)
for line in sys.stdin:
    cluster.add_node(**machine, num_cpus=2, num_gpus=1)  # a GPU by its name alone
cluster.shutdown()
"""


@dataclass
class Growing:
    process: subprocess.Popen[str]
    environment: dict[str, str]
    address: str

    def add(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@pytest.fixture
def growing() -> Iterator[Growing]:
    """A cluster of one machine without GPUs, to which ``add`` adds one that has a GPU."""
    with held(CLUSTER) as (process, ours, address):
        yield Growing(process, ours, address)


@pytest.fixture
def begin(rlhf, growing, tiny_model, prompts, tmp_path):
    def run(*flags: str) -> tuple[subprocess.Popen[str], Path]:
        command = [
            "train",
            "--algo",
            "rloo",
            "--actor.model",
            str(tiny_model),
            "--data",
            str(prompts),
            "--reward",
            "math_verifier",
        ]
        command += ["--train.steps", "1", "--train.batch-size", "2", "--rollout.n", "2", "--rollout.max-new-tokens", "4"]
        command += ["--runtime", "ray", "--ray.address", growing.address, "--run-dir", str(tmp_path / "run"), *flags]
        said = tmp_path / "err.txt"
        with said.open("w") as err, (tmp_path / "out.txt").open("w") as out:
            environment = {**rlhf.environment, **growing.environment}
            return rlhf.begin(command, environment, stdout=out, stderr=err), said

    return run


def test_a_run_waits_for_a_gpu_that_joins_and_says_what_it_asked_for(growing, begin):
    process, said = begin("--placement", "actor+rollout=1:gpu", "--ray.wait-s", "120")
    deadline = time.monotonic() + 90
    while "waiting up to 120 s (--ray.wait-s) for devices" not in said.read_text():
        assert process.poll() is None, said.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert (
        "is asked for 1 × 1 GPU with 1 CPU (actor+rollout, PACK); now it has 0 GPUs and 2 CPUs on 1 machine" in said.read_text()
    )
    growing.add()
    assert process.wait(timeout=120) == 0, said.read_text()


def test_cpus_are_taken_only_if_the_run_says_so(begin):
    process, said = begin()
    assert process.wait(timeout=90) == 2
    refused = said.read_text()
    assert "has no GPU now, and nothing says whether this run waits for some: --placement actor+rollout=1:gpu waits" in refused
    assert "--placement actor+rollout=1:cpu, or --actor.device cpu, computes on CPUs" in refused
    process, said = begin("--actor.device", "cpu")
    assert process.wait(timeout=120) == 0, said.read_text()


def test_what_never_joins_is_named_after_the_wait(begin):
    process, said = begin("--actor.device", "cuda", "--ray.wait-s", "3")
    assert process.wait(timeout=90) == 2
    refused = said.read_text().splitlines()[-1]
    assert "were not there within 3 s (--ray.wait-s), for which the cluster was asked for 1 × 1 GPU with 1 CPU" in refused
    assert "the placement needs 1 GPUs (actor+rollout 1), and the cluster has 0" in refused
