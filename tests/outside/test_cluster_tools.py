"""Other programs read ``examples/cluster``: SkyPilot's own loader, and Kubernetes' schemas. ``make test-clusters`` sets them up."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build/cluster-tools/bin/python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="needs SkyPilot and kubernetes-validate: make test-clusters")

SKY = """
import sys, sky, yaml
settings = yaml.safe_load(open(sys.argv[1])) | eval(sys.argv[2])
task = sky.Task.from_yaml_config(settings, secrets_overrides=[("RAY_AUTH_TOKEN", "x")])
[resources] = task.resources
[image] = resources.image_id.values()
print(task.num_nodes, resources.accelerators, image, *task.secrets)
"""
POD = """
import sys, yaml, kubernetes_validate
cluster = yaml.safe_load(open(sys.argv[1]))["spec"]["rayClusterSpec"]
for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]}
    pod["spec"].update(eval(sys.argv[2]))
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    print("valid")
"""


def run(program: str, file: str, change: str, home: Path) -> subprocess.CompletedProcess[str]:
    command = [PYTHON, "-c", program, ROOT / "examples/cluster" / file, change]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, env={"HOME": str(home)})


def test_skypilot_loads_the_task(tmp_path):
    done = run(SKY, "skypilot.yaml", "{}", tmp_path)
    assert done.stdout.split("\n")[-2].startswith("2 {'H100': 8} docker:nvidia/cuda:"), done.stderr
    assert done.stdout.strip().endswith("RAY_AUTH_TOKEN")


def test_skypilot_refuses_a_task_with_a_misspelt_key(tmp_path):
    assert "did you mean 'num_nodes'" in run(SKY, "skypilot.yaml", "{'num_node': 2}", tmp_path).stderr


def test_pods_of_the_ray_job_are_pods(tmp_path):
    assert run(POD, "rayjob.yaml", "{}", tmp_path).stdout == "valid\nvalid\n"


def test_a_pod_with_a_misspelt_key_is_refused(tmp_path):
    assert "'hostNetworks' was unexpected" in run(POD, "rayjob.yaml", "{'hostNetworks': True}", tmp_path).stderr
