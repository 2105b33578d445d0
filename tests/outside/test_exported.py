"""What ``rlhf env export`` makes, played by real clients in their own Python environments. ``make test-exported`` sets them up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.chat_models import save_chat_model

BUILD = Path(__file__).parents[2] / "build"
CLIENTS = Path(__file__).with_name("exported")
OPENENV, VERIFIERS = BUILD / "openenv/bin/python", BUILD / "verifiers/bin/python"
RETRY = ("retry", "--agent.max-turns", "3", "--agent.penalty", "0.25")
TOOLS = ("multi_turn", "--agent.tools", "tools.py", "--agent.max-turns", "4", "--reward", "reward.py:right")
pytestmark = [
    pytest.mark.skipif(not (OPENENV.exists() and VERIFIERS.exists()), reason="needs OpenEnv and verifiers: make test-exported"),
    pytest.mark.timeout(900),
]


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(3) for b in range(3)]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("reward.py").write_text("def right(text, label):\n    return 1.0 if str(label) in text else 0.1 * len(text)\n")
    tool = '"""Adds.\n\n    Args:\n        a: one\n        b: other\n    """\n    return f"sum is {a + b}"\n'
    Path("tools.py").write_text(f"def add(a: int, b: int) -> str:\n    {tool}")
    return tmp_path


def command(*words):
    return [sys.executable, "-m", "rlhf_host", "env", "export", *words, "--data", "sums.jsonl"]


@contextlib.contextmanager
def served(*words):
    def interruptible():
        signal.signal(signal.SIGINT, signal.default_int_handler)

    process = subprocess.Popen(command(*words, "--port", "0"), stdout=subprocess.PIPE, text=True, preexec_fn=interruptible)
    try:
        yield process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


def said(python, script, *words):
    words = [word if isinstance(word, str) else json.dumps(word) for word in words]
    variables = {**os.environ, "PYTHONPATH": str(Path.cwd() / "installed")}
    done = subprocess.run([python, CLIENTS / script, *words], capture_output=True, text=True, env=variables, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_openenv(files):
    with served(*RETRY, "--as", "openenv") as url:
        told = said(OPENENV, "openenv_client.py", url, "play")
    assert told["turns"] == ["1+1=", "That is not right. Try again.", 0.75, True]
    assert "reset first" in told["over"]
    assert told["fifty"] == [0.75 if number % 2 else 1.0 for number in range(50)]
    with served(*TOOLS, "--as", "openenv") as url:
        assert said(OPENENV, "openenv_client.py", url, "tools") == [["add"], "sum is 2"]


def installed(name, *words):
    """Exports a package and installs it where verifiers finds it."""
    subprocess.run(command(*words, "--as", "verifiers", "-o", name, "--name", name), check=True)
    pip = [
        VERIFIERS,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        "installed",
        f"./{name}",
    ]
    subprocess.run([VERIFIERS, "-m", "pip", "install", "--quiet", "hatchling"], check=True)
    subprocess.run(pip, check=True)


def test_verifiers(files):
    installed("sums_retry", *RETRY)
    config = {"taskset": {"id": "sums_retry"}}
    twice, wrong = said(VERIFIERS, "verifiers_client.py", "sums_retry", config, ["7", "2", "2"], [4, 5])
    assert (twice["rewards"], twice["metrics"]["retry/tries"]) == ({"reward": 0.75}, 2.0)
    assert (wrong["rewards"], wrong["metrics"]["retry/tries"]) == ({"reward": 0.0}, 3.0)
    installed("sums_tools", *TOOLS)
    answers = [[["add", {"a": 1, "b": 1}], ["add", {"a": 5, "b": 1}]], "it is 2"]
    config = {"taskset": {"id": "sums_tools"}}
    [one, other] = said(VERIFIERS, "verifiers_client.py", "sums_tools", config, answers, [4, 5])
    assert (one["rewards"], one["metrics"]["tools/add/calls"]) == ({"reward": 1.0}, 2.0)
    assert other["rewards"] == {"reward": 0.1 * len("it is 2")}


def test_nemo_gym_with_the_client_of_verifiers(files):
    with served(*TOOLS, "--as", "nemo-gym") as url:
        rows = subprocess.run(["curl", "-sf", f"{url}/rows"], capture_output=True, check=True).stdout
        Path("rows.jsonl").write_bytes(rows)
        agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
        taskset = {"id": "nemo_gym", "dataset": str(files / "rows.jsonl"), "task": {"resources_url": url}}
        answers = [[["add", {"a": 1, "b": 1}]], "it is 2"]
        config = {"taskset": taskset, "agent": agent}
        [one, other] = said(VERIFIERS, "verifiers_client.py", "nemo_gym", config, answers, [4, 5])
    assert one["rewards"] == {"nemo_gym": 1.0}
    assert other["rewards"] == {"nemo_gym": 0.1 * len("it is 2")}


def test_a_run_on_the_environment_that_verifiers_loads_is_the_run_on_the_agent(rlhf, files):
    model = save_chat_model(files / "model", hidden=64)
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] *= 100  # so that answers hardly depend on random numbers, which other keys give
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    words = (*RETRY, "--reward", "reward.py:right")
    installed("dense", *words)
    found = files / "installed/found.py"  # in an environment of its own the package is found by its name
    found.write_text("from dense import PlayEnv, Rows\n\n__all__ = ['PlayEnv', 'Rows']\n")
    place = {"environment": str(found), "python": str(VERIFIERS)}
    Path("there.yaml").write_text(json.dumps({"data": {"sources": [{"path": "verifiers", "name": "sums", **place}]}}))
    same = ("--algo", "reinforce_pp", "--actor.model", model, "--actor.lr", "3e-3", "--train.threads", "1", "--rollout.n", "1")
    same += ("--train.batch-size", "4", "--train.steps", "3", "--rollout.max-new-tokens", "8", "--rollout.temperature", "0.01")
    same += ("--trajectories.every", "1")
    rlhf.run("train", *same, "--agent", *words, "--data", "sums.jsonl", "--run-dir", "here")
    agent = ("--agent", "verifiers", "--agent.environment", found, "--agent.python", VERIFIERS)
    rlhf.run("train", "--config", "there.yaml", *same, *agent, "--run-dir", "there")
    here, there = (_rewards(Path(run)) for run in ("here", "there"))
    assert here == there
    assert len(here) == 12
    before, after, other = (load_file(f"{place}/model.safetensors") for place in ("model", "here/model", "there/model"))
    assert all(tensor.equal(other[name]) for name, tensor in after.items())
    assert any(not tensor.equal(before[name]) for name, tensor in after.items())


def _rewards(run):
    """Rewards by step and prompt."""
    rows = [json.loads(line) for file in sorted((run / "trajectories").iterdir()) for line in file.read_text().splitlines()]
    return {(row["step"], row["prompt"]): row["reward"] for row in rows}
