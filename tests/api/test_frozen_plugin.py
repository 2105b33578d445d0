"""A wheel built for the first API, and never again, still does all it did."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
WHEEL = HERE / "rlhf_plugin_first_api-0.10.0-py3-none-any.whl"
BUILT_THEN = "ae1fbf2ac15f94406c49aa8b28aa2b78e385bd26ca9fb6d27cb11d224c287b41"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the wheel installed, as pip does it."""
    folder = tmp_path_factory.mktemp("first-api") / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", folder, WHEEL], check=True)
    return folder


@pytest.fixture
def rlhf(rlhf_here, site, monkeypatch, tiny_model):
    """The command line in this process, the wheel installed."""
    monkeypatch.syspath_prepend(str(site))

    def run(*arguments):
        result = rlhf_here(*arguments)
        assert result.exit_code == 0, result.output
        return result.output

    yield run
    sys.modules.pop("rlhf_plugin_first_api", None)


@pytest.fixture
def flags(tiny_model):
    return [
        *("--algo", "first_algo", "--reward", "first_reward", "--with", "first_extension", "--tracker", "first_tracker"),
        *("--data", "first_tasks", "--eval.data", "first_tasks", "--sync", "first_sync", "--actor.model", tiny_model),
        *("--rollout.n", "4", "--rollout.max-new-tokens", "6", "--train.batch-size", "4", "--train.threads", "1"),
    ]


def rows(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_wheel_is_the_one_that_was_built_then():
    assert hashlib.sha256(WHEEL.read_bytes()).hexdigest() == BUILT_THEN, "it is frozen: a new API gets a new plugin"


def test_its_source_stands_beside_it():
    with zipfile.ZipFile(WHEEL) as archive:
        built = archive.read("rlhf_plugin_first_api/__init__.py").decode()
    assert built == (HERE / "first_api_plugin/src/rlhf_plugin_first_api/__init__.py").read_text(encoding="utf-8")


def test_it_is_listed_as_fit_for_this_host(rlhf):
    listed = json.loads(rlhf("plugins", "--json"))
    found = {row["name"]: row["status"] for row in listed if row["distribution"] == "rlhf-plugin-first-api"}
    assert len(found) == 10
    assert set(found.values()) == {"ok"}


def test_every_hook_of_the_first_api_is_called_in_a_run_and_its_resumption(rlhf, flags, tmp_path):
    run_dir = tmp_path / "run"
    rlhf("train", *flags, "--agent", "first_agent", "--train.steps", "2", "--run-dir", run_dir)
    rlhf("train", "--resume", run_dir, "--train.steps", "3")
    report = json.loads((run_dir / "first_api.json").read_text())
    hooks = json.loads((HERE / "first_api.json").read_text())["hooks"]
    assert set(report["calls"]) == set(hooks) - {"agent_run", "make_rows"}
    assert report["status"] == "finished"
    assert report["steps"] == 3, "two steps, and one more after the state came back"
    metrics = rows(run_dir)
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    for row in metrics[1:]:
        assert row["first/turns"] == 1.0
        assert row["first/spread"] > 0
        assert row["first/vowels"] == row["reward/first_reward.vowels"]
        assert row["reward/agent"] > 0
        assert row["correction/mean"] == pytest.approx(1.0, abs=1e-4), "one update per batch: trainer and sampler agree"
        assert {"loss/policy", "loss/entropy", "loss/first", "loss/every", "score/mean"} <= row.keys()
    assert [row["lr"] for row in metrics[2:]] == pytest.approx([1e-4, 5e-5]), "adjusted after each step"


def test_what_it_cannot_judge_says_why(rlhf, flags, tmp_path):
    run_dir = tmp_path / "run"
    doubt = ["--reward", "doubt=first_doubt", "--reward.doubt.weight", "0"]
    rlhf("train", *flags, *doubt, "--agent", "first_agent", "--train.steps", "1", "--run-dir", run_dir, "--trajectories.tokens")
    rows_of_step = (run_dir / "trajectories" / "train-step-000001.jsonl").read_text().splitlines()
    assert all(json.loads(line)["rewards"]["doubt"] is None for line in rows_of_step)


def test_an_algorithm_that_chooses_its_rows_still_trains(rlhf, flags, tmp_path):
    run_dir = tmp_path / "run"
    without = [flag for flag in flags if flag not in ("--with", "first_extension", "--algo", "first_algo")]
    rlhf("train", *without, "--algo", "first_rows", "--train.steps", "1", "--run-dir", run_dir)
    assert "loss/nll" in rows(run_dir)[-1]


def test_an_agent_that_owns_its_loop_still_plays(rlhf, flags, tmp_path):
    run_dir = tmp_path / "run"
    rlhf("train", *flags, "--agent", "first_owner", "--train.steps", "1", "--run-dir", run_dir)
    assert rows(run_dir)[-1]["length/max"] <= 4
    assert "agent_run" in json.loads((run_dir / "first_api.json").read_text())["calls"]
