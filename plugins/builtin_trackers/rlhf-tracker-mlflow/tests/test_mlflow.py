"""Runs in the real MLflow, read back by its own client and compared with the run's own files."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from rlhf_authoring.trackers import (
    FAILURE,
    HOSTILE_TEXT,
    ODD_METRICS,
    SmallRun,
    finish_and_fail,
    logged_metrics,
    logged_trajectories,
    trajectory,
)
from rlhf_tracker_mlflow import MLflow, allowed

from rlhf_host import Outcome, PluginError
from rlhf_host.distributed import reserved

mlflow = pytest.importorskip("mlflow", reason="needs mlflow: make test-trackers")


class Found:
    """The only run of a store, as MLflow has it."""

    def __init__(self, uri: str, experiment: str = "rlhf-host"):
        self.client = mlflow.MlflowClient(tracking_uri=uri)
        self.experiment = self.client.get_experiment_by_name(experiment)
        (self.run,) = self.client.search_runs([self.experiment.experiment_id])
        self.uri = uri

    @property
    def params(self) -> dict[str, str]:
        return self.run.data.params

    def history(self, name: str) -> list[tuple[int, float]]:
        items = self.client.get_metric_history(self.run.info.run_id, name)
        return [(item.step, item.value) for item in sorted(items, key=lambda item: (item.step, item.timestamp))]

    def last(self) -> dict[int, dict[str, float]]:
        """Step → metrics; of a step that was logged twice the later values."""
        found: dict[int, dict[str, float]] = {}
        for name in self.run.data.metrics:
            for step, value in self.history(name):
                found.setdefault(step, {})[name] = value
        return found

    def files(self, folder: str = "") -> list[str]:
        return [item.path for item in self.client.list_artifacts(self.run.info.run_id, folder)]

    def text(self, path: str) -> str:
        place = mlflow.artifacts.download_artifacts(run_id=self.run.info.run_id, artifact_path=path, tracking_uri=self.uri)
        return Path(place).read_text("utf-8")

    def table(self, path: str) -> list[dict[str, str]]:
        return list(csv.DictReader(self.text(path).splitlines()))


def under(run_dir: Path, experiment: str = "rlhf-host") -> Found:
    return Found(f"sqlite:///{run_dir / 'mlflow' / 'mlflow.db'}", experiment)


def named(metrics: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    return {step: {allowed(name): value for name, value in row.items()} for step, row in metrics.items()}


def made(**options: Any) -> MLflow:
    return MLflow(MLflow.Options(**options))


@pytest.fixture(autouse=True)
def _no_server(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)


def test_a_run_by_command_line_is_in_mlflow_as_in_its_own_files(tmp_path):
    SmallRun(tmp_path).train(
        "--train.steps", "3", "--mlflow.experiment", "sums", "--mlflow.every", "1", "--mlflow.tags", '{"team": "ä"}'
    )
    found = under(tmp_path / "run", "sums")
    assert (found.run.info.status, found.run.info.run_name, found.run.data.tags["team"]) == ("FINISHED", "run", "ä")
    own = logged_metrics(tmp_path / "run")
    assert sorted(own) == [0, 1, 2, 3]
    assert found.last() == named(own)
    assert "eval/pass_at_1" in found.last()[0]
    assert (found.params["train.steps"], found.params["tracker.mlflow.experiment"]) == ("3", "sums")
    assert json.loads(found.text("config.json"))["rollout"]["n"] == 2
    rows = found.table("trajectories/train-step-000003.csv")
    assert [(row["completion"], float(row["reward"]), float(row["advantage"])) for row in rows] == [
        (row["text"] + "<eos>" * (row["finish_reason"] == "stop"), row["reward"], row["advantage"])
        for row in logged_trajectories(tmp_path / "run", "train", 3)
    ]
    assert found.files("trajectories") == [
        f"trajectories/{name}.csv"
        for name in ("eval-step-000000", "eval-step-000003", *(f"train-step-{step:06d}" for step in (1, 2, 3)))
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_killed_run_goes_on_in_the_same_run(tmp_path):
    small = SmallRun(tmp_path)
    small.train("--train.steps", "5", "--mlflow", KILL_AFTER="4", code=-9)
    killed = under(tmp_path / "run")
    assert killed.run.info.status == "RUNNING"
    assert sorted(killed.last()) == [0, 1, 2, 3]
    told = small.rlhf("train", "--resume", "run", "--train.steps", "6", "--mlflow").stderr
    found = under(tmp_path / "run")
    assert found.run.info.run_id == killed.run.info.run_id
    assert found.run.info.status == "FINISHED"
    last, own = found.last(), named(logged_metrics(tmp_path / "run"))
    assert {step: {name: last[step][name] for name in row} for step, row in own.items()} == own
    # Nothing that is in MLflow can be taken away: step 3 came after the checkpoint, and is there as both runs had it.
    assert [step for step, _ in found.history("reward/mean")] == [1, 2, 3, 3, 4, 5, 6]
    assert found.params["train.steps"] == "5"
    assert "mlflow keeps the parameters that its run began with, of train.steps" in told
    assert json.loads(found.text("config-from-step-3.json"))["train"]["steps"] == 6


def test_runs_of_one_process_are_apart_and_a_failed_one_is_marked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    finish_and_fail("mlflow", {"run_name": "short"}, {})
    runs = [under(tmp_path / name) for name in ("first", "second")]
    assert [(found.run.info.run_name, found.run.info.status) for found in runs] == [("short", "FINISHED"), ("second", "FAILED")]
    assert runs[0].last() == named(logged_metrics(tmp_path / "first"))
    assert FAILURE in runs[1].run.data.tags["error"]


def test_odd_metrics_texts_and_settings_are_kept(tmp_path):
    tracker = made(every=1)
    tracker.run_started(
        SmallRun(tmp_path).context(long="ü" * 9000, nested={"a b": {"c?": [1, None]}, "empty": {}}, half="\ud800")
    )
    tracker.log_metrics(1, ODD_METRICS)
    tracker.log_trajectories(1, "train", [trajectory(HOSTILE_TEXT, HOSTILE_TEXT), trajectory()])
    tracker.log_trajectories(2, "train", [])
    tracker.run_finished(Outcome("interrupted", 2))
    found = under(tmp_path / "run")
    assert found.run.info.status == "KILLED"
    values = found.last()[1]
    assert math.isnan(values.pop("nan"))
    assert values.pop("inf") > 1e300
    assert values == {
        "reward/mean": 0.5,
        "eval/pass_at_1": 0.25,
        "eval/pass_at_1_2": 0.75,
        "eval/äöü _50___ _q_": 1.5,
        "up/down": 2.5,
        "long/" + "a" * 245: 3.5,
        "step": 4.5,
    }
    assert found.params == {
        "long": "ü" * 6000,
        "nested.a b.c_": "[1, null]",
        "nested.empty": "{}",
        "half": "\\ud800",
    }
    assert json.loads(found.text("config.json"))["long"] == "ü" * 9000
    (path,) = found.files("trajectories")
    place = mlflow.artifacts.download_artifacts(run_id=found.run.info.run_id, artifact_path=path, tracking_uri=found.uri)
    with open(place, encoding="utf-8", newline="") as file:
        first, second = csv.DictReader(file)
    assert first["completion"] == HOSTILE_TEXT.replace("\ud800", "\\ud800")
    assert second["completion"] == "5"


def test_a_dry_run_writes_nothing(tmp_path):
    SmallRun(tmp_path).train("--train.steps", "3", "--mlflow", "--dry-run")
    assert list(tmp_path.iterdir()) == []


def test_without_a_run_directory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    somewhere = SmallRun(tmp_path).context()
    somewhere.run_dir = None
    tracker = made()
    tracker.run_started(somewhere)
    tracker.log_metrics(1, {"loss": 1.0})
    tracker.run_finished(Outcome("finished", 1))
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_no_longer_there_is_named(tmp_path):
    tracker = made()
    tracker.load_state_dict({"id": "0" * 32})
    with pytest.raises(PluginError, match=r"cannot start at sqlite:.*, or go on with its run 0{32}: .*not found"):
        tracker.run_started(SmallRun(tmp_path).context(resume_step=2))


@pytest.fixture
def server(tmp_path_factory, monkeypatch):
    """The tracking server of MLflow, and the process that is it."""
    pytest.importorskip("flask", reason="needs all of mlflow: make test-trackers")
    folder = tmp_path_factory.mktemp("server")
    place = reserved("127.0.0.1")
    port = place.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    places = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "artifacts")]
    variables = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # eight more processes
    process = subprocess.Popen(
        [*command, *places], cwd=folder, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 400
    try:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health").close()
                break
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield url, process
    finally:
        process.terminate()
        process.wait(120)
        place.close()


def test_a_server_gets_the_run_and_once_it_is_gone_the_tracker_says_so(server, tmp_path, monkeypatch):
    url, process = server
    monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "of the environment")
    tracker = made(every=1)
    tracker.run_started(SmallRun(tmp_path).context(seed=3))
    tracker.log_metrics(1, {"loss": 0.25})
    tracker.log_trajectories(1, "train", [trajectory()])
    found = Found(url, "of the environment")
    assert found.last() == {1: {"loss": 0.25}}
    assert found.table("trajectories/train-step-000001.csv")[0]["completion"] == "5"
    assert not (tmp_path / "run").exists()
    process.terminate()
    process.wait(120)
    with pytest.raises(mlflow.exceptions.MlflowException, match=f"API request to {url}"):
        tracker.log_metrics(2, {"loss": 0.5})


def test_a_server_that_is_not_there_ends_the_run_before_it_begins(tmp_path):
    uri = "http://127.0.0.1:9"
    done = SmallRun(tmp_path).train("--train.steps", "3", "--mlflow.uri", uri, code=2, MLFLOW_HTTP_REQUEST_MAX_RETRIES="0")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("Error")]
    assert f"tracker 'mlflow' cannot start at {uri}: API request to {uri}" in line
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run/checkpoints").exists()
