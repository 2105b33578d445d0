"""GPUs of the machines of a Ray cluster that a run joins, with a stand-in for NVML on each."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from rlhf_authoring.trackers import SmallRun, logged_metrics

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(600)

STAND_IN = str(Path(__file__).with_name("stand_in"))

CLUSTER = """
import os, sys
from ray.cluster_utils import Cluster
same = {"num_gpus": 0, "object_store_memory": 100 * 2**20}
head = dict(same, num_cpus=2, node_ip_address="127.0.0.1", include_dashboard=False, temp_dir=os.environ["RAY_TMPDIR"])
cluster = Cluster(initialize_head=True, head_node_args=head)
for address in ("127.0.0.2", "127.0.0.3")[:int(sys.argv[1])]:
    cluster.add_node(**same, num_cpus=2, node_ip_address=address)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.mark.parametrize("others", [1])
def test_every_machine_of_a_cluster_is_watched(tmp_path, others):
    with tempfile.TemporaryDirectory(prefix="rg-", dir="/tmp", ignore_cleanup_errors=True) as made:
        Path(made, "ray").mkdir()
        variables = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": made,
            "GPUS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (STAND_IN, os.environ.get("PYTHONPATH")))),
        }
        command = [sys.executable, "-c", CLUSTER, str(others)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables}
        ) as cluster:
            assert cluster.stdout is not None
            address = cluster.stdout.readline().strip()
            small = SmallRun(tmp_path)
            flags = ("--runtime", "ray", "--ray.address", address, "--placement", "actor=1:cpu", "--placement", "rollout=1:cpu")
            # The controller's own machine needs no GPU.
            here = {**variables, "GPUS": "none"}
            small.train("--train.steps", "2", *flags, "--with", "gpu_metrics", **here)
            cluster.communicate(timeout=60)
    for step in (1, 2):
        names = [name for name in logged_metrics(small.run_dir)[step] if name.endswith("/power_w") and name != "gpu/power_w"]
        # Both have this machine's name, so their addresses tell them apart.
        assert sorted(names) == ["gpu/127.0.0.1:0/power_w", "gpu/127.0.0.2:0/power_w"]
        assert logged_metrics(small.run_dir)[step]["gpu/power_w"] in (200.0, 400.0, 600.0)
