"""A game served by the real ``openenv-core``, in its own environment: three steps of training. ``make test-openenv`` sets it up."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf_host.distributed import reserved
from tests.chat_models import save_chat_model

HERE = Path(__file__).parent
PYTHON = HERE.parent.parent / "build/openenv/bin/python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="needs openenv-core: make test-openenv")


@pytest.fixture
def url():
    place = reserved("127.0.0.1")
    port = place.getsockname()[1]
    process = subprocess.Popen([str(PYTHON), str(HERE / "openenv_server.py"), str(port), "2"])
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{address}/schema", timeout=1).read()
                break
            except OSError:
                time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(10)
        place.close()


def test_a_real_server_trains(url, rlhf, tmp_path):
    model = save_chat_model(tmp_path / "model", hidden=64)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"prompt": f"game {n}", "label": "1"}) + "\n" for n in range(4)))
    rlhf.run(
        *(
            "train",
            "--algo",
            "rloo",
            "--agent",
            "openenv",
            "--agent.url",
            url,
            "--agent.at-once",
            "2",
            "--agent.max-turns",
            "4",
        ),
        *("--actor.model", model, "--actor.lr", "1e-3", "--data", tmp_path / "data.jsonl", "--run-dir", tmp_path / "run"),
        *("--rollout.n", "4", "--train.batch-size", "2", "--train.steps", "3", "--rollout.max-new-tokens", "6"),
        *("--train.threads", "1", "--trajectories.every", "1"),
    )
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert max(row["mismatch/max"] for row in rows) < 1e-5
    assert [row["rollout/failed"] for row in rows] == [0.0] * 3
    files = sorted((tmp_path / "run/trajectories").iterdir())
    said = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(said) == 24
    assert all("0-9?" in row["prompt"] for row in said)
    kinds = {event["kind"] for row in said for event in row.get("events", [])}
    print(sum(row["reward"] for row in said), kinds)
    assert kinds & {"step", "invalid"}
    before, after = (load_file(tmp_path / place / "model.safetensors") for place in ("model", "run/model"))
    assert any(not torch.equal(tensor, after[name]) for name, tensor in before.items())
