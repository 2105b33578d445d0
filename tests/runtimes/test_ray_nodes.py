"""PPO with actor, critic, reference and reward model over three nodes; an engine is killed in mid-run."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")

pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow]

CLUSTER = """
import os, sys
from ray.cluster_utils import Cluster
node = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": 100 * 2**20, "node_ip_address": "127.0.0.1"}
cluster = Cluster(initialize_head=True, head_node_args=dict(node, include_dashboard=False, temp_dir=os.environ["RAY_TMPDIR"]))
cluster.add_node(**node)
cluster.add_node(**node)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture
def three_nodes(monkeypatch):
    """The address of a cluster of three nodes with two CPUs each; the environment lets this process's children in."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp", ignore_cleanup_errors=True) as made:
        Path(made, "ray").mkdir()
        ours = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # keeps it on the loopback
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": made,
        }
        for name, value in ours.items():
            monkeypatch.setenv(name, value)
        with subprocess.Popen(
            [sys.executable, "-c", CLUSTER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ours},
        ) as process:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), ours
            process.communicate(timeout=60)


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    from transformers import AutoModelForSequenceClassification

    from rlhf_host.testing.models import tiny_tokenizer, write_tiny_model

    plain = write_tiny_model(tmp_path_factory.mktemp("plain"), seed=1)
    judge = AutoModelForSequenceClassification.from_pretrained(plain, num_labels=1)
    made = tmp_path_factory.mktemp("judge")
    judge.save_pretrained(made)
    tiny_tokenizer().save_pretrained(made)
    return made


def engine_processes(marker: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if "EngineActor" in (entry / "cmdline").read_text() and marker in (entry / "environ").read_text():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_ppo_over_three_nodes_survives_an_engine(rlhf, three_nodes, tiny_model, reward_model, prompts, tmp_path):
    address, ours = three_nodes
    rlhf.environment.update(ours)
    steps, each = 60, 16
    process = rlhf.start(
        *("train", "--algo", "ppo", "--reward", "reward_model", "--reward-model.model", reward_model, "--kl.coef", "0.01"),
        *(
            "--reward.reward_model.template",
            "same_tokens",
            "--actor.model",
            tiny_model,
            "--actor.lr",
            "1e-3",
            "--data",
            prompts,
        ),
        *(
            "--rollout.n",
            "4",
            "--rollout.max-new-tokens",
            "32",
            "--train.batch-size",
            "4",
            "--train.steps",
            steps,
            "--train.threads",
            "1",
        ),
        *("--runtime", "ray", "--ray.address", address, "--run-dir", tmp_path / "run"),
        *("--placement", "actor+reference=2x1", "--placement", "critic+reward=1", "--placement", "rollout=2:spread"),
    )
    rows = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 400
    while not (rows.exists() and rows.read_text().count("\n") >= 3):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    victim, *others = engine_processes(ours["RAY_AUTH_TOKEN"])
    assert len(others) == 1
    os.kill(victim, signal.SIGKILL)
    _, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert "died; it is started again" in err
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["step"] for row in found] == list(range(1, steps + 1))
    for row in found:
        assert row["rollout/groups"] == 4
        assert row["rollout/failed"] == row["rollout/unjudged"] == 0
        assert row["mismatch/max"] < 1e-4
    for step in range(1, steps + 1):
        lines = (tmp_path / "run" / "trajectories" / f"train-step-{step:06d}.jsonl").read_text().splitlines()
        episodes = [json.loads(line)["episode_id"] for line in lines]
        assert len(set(episodes)) == len(episodes) == each
