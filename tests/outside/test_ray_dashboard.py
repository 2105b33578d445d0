"""``--ray.dashboard true`` in a real run, with what only Ray's dashboard needs: ``make test-dashboard`` sets it up."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ROOT / "build/ray-dashboard"
pytestmark = [
    pytest.mark.skipif(not PARTS.exists(), reason="needs the parts of ray[default]: make test-dashboard"),
    pytest.mark.timeout(600),
]

FLAGS = ("--algo", "rloo", "--reward", "math_verifier", "--train.steps", "500", "--run-dir", "run")
RAY = (
    "--runtime",
    "ray",
    "--ray.num-cpus",
    "2",
    "--ray.num-gpus",
    "0",
    "--ray.object-store-mb",
    "200",
    "--ray.dashboard",
    "true",
)
LINE = re.compile(r"Ray's dashboard: (http://127\.0\.0\.1:\d+); it asks for the token in (\S+)\n")


def status(address: str, token: str | None = None) -> int:
    request = urllib.request.Request(address, headers={} if token is None else {"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            code: int = answer.status
            return code
    except urllib.error.HTTPError as error:
        return error.code


def listening(port: int) -> list[str]:
    """The addresses, in hexadecimal, at which something listens on the port."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port]


def test_a_run_of_its_own_cluster_has_the_dashboard_with_its_token(tmp_path):
    path = os.pathsep.join(filter(None, (str(PARTS), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "rlhf_host", "train", *FLAGS, *RAY]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as run:
        assert run.stderr is not None
        said = ""
        while (found := LINE.search(said)) is None and (line := run.stderr.readline()):
            said += line
        assert found is not None, said
        address, token = found[1], Path(found[2]).read_text()
        assert listening(int(address.rsplit(":", 1)[1])) == ["0100007F"]
        assert status(f"{address}/api/v0/nodes") == 401
        assert status(f"{address}/api/v0/nodes", "0" * len(token)) in (401, 403)
        assert status(f"{address}/api/v0/nodes", token) == 200
        assert status(f"{address}/") == 200  # the page, which asks for the token
        while not (tmp_path / "run/run.json").exists() and run.poll() is None:
            time.sleep(0.2)
        about = json.loads((tmp_path / "run/run.json").read_text())
        assert about["ray_dashboard"] == address
        assert token not in (tmp_path / "run/config.yaml").read_text() + said + json.dumps(about)
        run.send_signal(signal.SIGINT)
        said += run.stderr.read()
        assert run.wait(timeout=120) == 130, said
    assert listening(int(address.rsplit(":", 1)[1])) == []
