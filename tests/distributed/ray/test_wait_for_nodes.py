"""``examples/cluster/wait_for_nodes.py`` beside a real Ray cluster on the loopback address: machines late and missing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .clusters import held

pytest.importorskip("ray")

SCRIPT = Path(__file__).resolve().parents[3] / "examples/cluster/wait_for_nodes.py"
CLUSTER = """
import sys
from ray.cluster_utils import Cluster

machine = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 100 * 2**20, "node_ip_address": "127.0.0.1"}
cluster = Cluster(initialize_head=True, head_node_args=dict(machine, include_dashboard=False))
print(cluster.address, flush=True)
for _ in sys.stdin:
    cluster.add_node(**machine)
cluster.shutdown()
"""


@pytest.fixture
def cluster() -> Iterator[tuple[subprocess.Popen[str], dict[str, str], str]]:
    """A cluster of one machine, to which a line adds another; the environment of those who join; its address."""
    with held(CLUSTER) as (process, ours, address):
        yield process, {**os.environ, **ours}, address


def test_it_waits_for_a_machine_that_joins_late_and_says_which_never_came(cluster):
    process, environment, address = cluster
    wait = [sys.executable, SCRIPT, address]
    late = subprocess.run([*wait, "2", "1"], env=environment, capture_output=True, text=True, check=False)
    assert late.returncode == 1
    assert f"1 of 2 machines are in the Ray cluster {address} after 1 s: read what `ray start` printed" in late.stderr
    waiting = subprocess.Popen([*wait, "2", "120"], env=environment, stdout=subprocess.PIPE, text=True)
    time.sleep(3)
    assert waiting.poll() is None
    process.stdin.write("add\n")
    process.stdin.flush()
    out, _ = waiting.communicate(timeout=120)
    assert waiting.returncode == 0
    assert f"2 of 2 machines are in the Ray cluster {address}" in out


def test_no_cluster_at_all_is_said_too():
    done = subprocess.run(
        [sys.executable, SCRIPT, "127.0.0.1:9", "2", "0"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "0 of 2 machines are in the Ray cluster 127.0.0.1:9" in done.stderr
