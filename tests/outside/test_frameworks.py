"""Agent frameworks, unchanged, as environments: three steps each, with weights that move. ``make test-frameworks`` sets them up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.chat_models import save_chat_model

HERE = Path(__file__).parent
PYTHON = HERE.parent.parent / "build/frameworks/bin/python"
pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="needs the frameworks: make test-frameworks"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("framework", "tokens", "rows"),
    [
        ("openai_agents", 2500, [["p", "a", "o", "a"]]),  # an answer that is cut is an error there
        ("langgraph", 12, [["p", "a", "o", "a"]]),
        ("smolagents", 12, None),  # it tells the model of its own calls as text, so turns are rows of their own
    ],
)
def test_a_framework_trains(framework, tokens, rows, rlhf, model, tmp_path):
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1?", "label": "1"}) + "\n" for n in range(4)))
    rlhf.run(
        *("train", "--algo", "rloo", "--agent", "openai_agent", "--actor.model", model, "--data", tmp_path / "data.jsonl"),
        *("--agent.command", f"{PYTHON} {HERE}/frameworks/with_{framework}.py {{task_file}}", "--agent.at-once", "2"),
        *("--rollout.n", "2", "--train.batch-size", "1", "--train.steps", "3", "--rollout.max-new-tokens", str(tokens)),
        *("--actor.lr", "1e-3", "--run-dir", tmp_path / "run", "--train.threads", "1"),
        *("--trajectories.every", "1", "--trajectories.tokens"),
    )
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert max(row["mismatch/max"] for row in steps) < 1e-5
    assert all(row["rollout/failed"] == 0 for row in steps)
    said = [json.loads(line) for line in (tmp_path / "run/trajectories/train-step-000003.jsonl").read_text().splitlines()]
    first = [row for row in said if row["episode_id"] == said[0]["episode_id"]]
    kinds = [[segment["kind"][0] for segment in row["segments"]] for row in first]
    print(framework, kinds)
    assert kinds == rows if rows is not None else len(kinds) >= 2
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "run/model"))
    assert any(not torch.equal(tensor, after[name]) for name, tensor in before.items()), "weights moved"
