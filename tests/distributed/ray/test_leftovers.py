"""What a killed controller's Ray cluster leaves behind is gone when the next one starts; what lives stays."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")

pytestmark = pytest.mark.timeout(600)

CONTROLLER = """
import subprocess, sys
from rlhf_host.distributed.ray.plugin import Ray
from rlhf_host.distributed.ray.cluster import RayCluster

cluster = RayCluster(Ray.Options(num_cpus=1, num_gpus=0, object_store_mb=100, temp_dir=sys.argv[1]))
cluster.start()
import ray

@ray.remote(num_cpus=0)
class Idle:
    def pid(self):
        return 0

idle = Idle.remote()
ray.get(idle.pid.remote())
own = subprocess.Popen(["sleep", "300"], stdout=subprocess.DEVNULL)
print(own.pid, flush=True)
sys.stdin.readline()
own.kill()
cluster.stop()
"""


def start_controller(directory: Path) -> tuple[subprocess.Popen[str], int]:
    """A process with a cluster of its own, and the number of a child of its own that has nothing to do with Ray."""
    directory.mkdir()
    command = [sys.executable, "-c", CONTROLLER, str(directory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, int(process.stdout.readline())


def ray_processes(directory: Path) -> dict[int, str]:
    """Number → title of the living processes, but for the controller, that write logs beneath the directory."""
    titles = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            title = (entry / "cmdline").read_bytes().strip(b"\0").replace(b"\0", b" ").decode(errors="replace")
            opened = [os.readlink(each) for each in (entry / "fd").iterdir()]
        except OSError:
            continue
        if any(each.startswith(f"{directory}/rlhf-ray-") for each in opened) and CONTROLLER not in title:
            titles[int(entry.name)] = title
    return titles


@pytest.fixture
def place():
    """A directory whose path is short enough for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="rl-", dir="/tmp") as made:
        yield Path(made)


def test_the_next_start_ends_what_a_killed_controller_left(place):
    killed, own = start_controller(place / "killed")
    lives, another = start_controller(place / "lives")
    agents: set[int] = set()
    try:
        # The raylet and its workers go with the controller; agents often stay for a minute, and these for ever.
        agents = {
            pid for pid, title in ray_processes(place / "killed").items() if title.startswith("ray::") and "Agent" in title
        }
        assert len(agents) == 2
        for pid in agents:
            os.kill(pid, signal.SIGSTOP)
        killed.kill()
        killed.wait()
        deadline = time.monotonic() + 60
        while len(ray_processes(place / "killed")) > 2 and time.monotonic() < deadline:
            time.sleep(0.2)
        log = next((place / "killed").glob("rlhf-ray-*/session_2*/logs/raylet.out"))
        reader = subprocess.Popen(["tail", "-f", str(log)], stdout=subprocess.DEVNULL)
        before = ray_processes(place / "lives")
        assert before
        following, _ = start_controller(place / "next")
        assert ray_processes(place / "killed").keys() == {reader.pid}
        assert list((place / "killed").iterdir()) == []
        assert before.items() <= ray_processes(place / "lives").items()
        os.kill(own, 0)  # not a process of Ray's
        assert reader.poll() is None
        reader.kill()
        reader.wait()
        for process in (following, lives):
            process.communicate("\n", timeout=60)
            assert process.returncode == 0
    finally:
        for pid in (own, another, *agents):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        lives.kill()
