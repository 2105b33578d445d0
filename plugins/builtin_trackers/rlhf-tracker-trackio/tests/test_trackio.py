"""Runs in the real Trackio, read back by Trackio and compared with the run's own files."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import warnings
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
from rlhf_tracker_trackio import Trackio

from rlhf_host import Outcome, PluginError

# What is read back is what another process finds, as a dashboard would.
READ = """
import json, sys
from trackio import Api
from trackio.sqlite_storage import SQLiteStorage
found = []
for run in Api().runs(sys.argv[1]):
    rows = SQLiteStorage.get_logs(sys.argv[1], run.name, run_id=run.id)
    found.append({"id": run.id, "name": run.name, "config": run.config, "rows": rows, "alerts": run.alerts()})
print(json.dumps(found))
"""
trackio = pytest.importorskip("trackio", reason="needs trackio: make test-trackers")


@pytest.fixture(autouse=True)
def folder() -> Path:
    """The folder of Trackio in this process, which ``conftest`` has chosen before Trackio was imported."""
    return trackio.utils.TRACKIO_DIR


class Found:
    """A run as Trackio has it."""

    def __init__(self, run: dict[str, Any]):
        self.id, self.name, self.config, self.alerts = (run[key] for key in ("id", "name", "config", "alerts"))
        self.rows = run["rows"]

    def metrics(self) -> list[tuple[int, dict[str, Any]]]:
        """Step and metrics of every row, in the order that they were logged in."""
        rows = [{name: value for name, value in row.items() if name != "timestamp"} for row in self.rows]
        rows = [row for row in rows if not any(name.endswith("/trajectories") for name in row)]
        return [(row.pop("step"), row) for row in rows]

    def tables(self) -> dict[tuple[int, str], list[dict[str, Any]]]:
        return {
            (row["step"], name): value["_value"]
            for row in self.rows
            for name, value in row.items()
            if name.endswith("/trajectories")
        }


def runs(project: str, folder: Path) -> list[Found]:
    command = [sys.executable, "-W", "ignore", "-c", READ, project]
    variables = {"TRACKIO_DIR": str(folder), "HF_HUB_OFFLINE": "1", "PATH": ""}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [Found(run) for run in json.loads(done.stdout.splitlines()[-1])]


def made(**options: Any) -> Trackio:
    return Trackio(Trackio.Options(**options))


def test_a_run_by_command_line_is_in_trackio_as_in_its_own_files(tmp_path):
    place = tmp_path / "trackio"
    SmallRun(tmp_path).train(
        "--train.steps",
        "3",
        "--trackio.project",
        "sums",
        "--trackio.group",
        "ä",
        "--trackio.every",
        "1",
        TRACKIO_DIR=str(place),
    )
    (found,) = runs("sums", place)
    assert (found.name, found.config["_Group"], found.config["train"]["steps"]) == ("run", "ä", 3)
    assert dict(found.metrics()) == logged_metrics(tmp_path / "run")
    assert [step for step, _ in found.metrics()] == [0, 1, 2, 3]
    assert found.alerts == []
    tables = found.tables()
    assert sorted(tables) == [
        (0, "eval/trajectories"),
        *((step, "train/trajectories") for step in (1, 2)),
        (3, "eval/trajectories"),
        (3, "train/trajectories"),
    ]
    own = logged_trajectories(tmp_path / "run", "train", 3)
    assert [(row["reward"], row["advantage"], row["length"]) for row in tables[3, "train/trajectories"]] == [
        (row["reward"], row["advantage"], row["length"]) for row in own
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "trackio"]


def test_a_killed_run_goes_on_in_the_same_run(tmp_path):
    small = SmallRun(tmp_path)
    place = tmp_path / "trackio"
    small.train("--train.steps", "5", "--trackio", KILL_AFTER="4", code=-9, TRACKIO_DIR=str(place))
    (killed,) = runs("rlhf-host", place)
    small.rlhf("train", "--resume", "run", "--train.steps", "5", TRACKIO_DIR=str(place))
    (found,) = runs("rlhf-host", place)
    assert found.id == killed.id
    own, last = logged_metrics(tmp_path / "run"), dict(found.metrics())
    # A process that is killed loses what Trackio had not written, and it takes nothing away: step 3, after the checkpoint, may be
    # there twice.
    assert last.items() <= own.items()
    assert {3, 4, 5} <= last.keys()
    steps = [step for step, _ in found.metrics()]
    assert [*dict.fromkeys(steps)] == sorted(last)
    assert len(steps) - len(last) <= steps.count(3) - 1 <= 1


def test_runs_of_one_process_are_apart_and_a_failed_one_has_an_alert(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    finish_and_fail("trackio", {"project": "two"}, {"project": "two"})
    found = {run.name: run for run in runs("two", folder)}
    assert sorted(found) == ["first", "second"]
    assert dict(found["first"].metrics()) == logged_metrics(tmp_path / "first")
    (alert,) = found["second"].alerts
    assert (alert["title"], alert["level"]) == ("The run has failed", "error")
    assert FAILURE in alert["text"]


def test_odd_metrics_texts_and_settings_are_kept(tmp_path, folder):
    tracker = made(project="odd", every=1)
    tracker.run_started(SmallRun(tmp_path).context(long="ü" * 9000, nested={"a b": {"c?": [1, None]}}, half="\ud800"))
    tracker.log_metrics(1, ODD_METRICS)
    tracker.log_trajectories(1, "train", [trajectory(HOSTILE_TEXT, HOSTILE_TEXT), trajectory()])
    tracker.log_trajectories(2, "train", [])
    tracker.run_finished(Outcome("interrupted", 2))
    (found,) = runs("odd", folder)
    ((step, values),) = found.metrics()
    assert step == 1
    assert math.isnan(values.pop("nan"))
    assert values.pop("inf") == math.inf
    expected = {name: value for name, value in ODD_METRICS.items() if name not in ("nan", "inf", "text", "step")}
    assert values == {**expected, "__step": 4.5}
    assert found.config["long"] == "ü" * 9000
    assert found.config["nested"] == {"a b": {"c?": [1, None]}}
    assert found.config["half"] == "\\ud800"
    ((_, first), *_) = found.tables().items()
    assert first[0]["completion"] == HOSTILE_TEXT.replace("\ud800", "\\ud800")
    assert [alert["title"] for alert in found.alerts] == ["The run has been interrupted"]


def test_a_dry_run_writes_nothing(tmp_path):
    SmallRun(tmp_path).train("--train.steps", "3", "--trackio", "--dry-run", TRACKIO_DIR=str(tmp_path / "trackio"))
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_a_newer_run_has_is_not_gone_on_with(tmp_path):
    small = SmallRun(tmp_path)
    first, second, resumed = (made(project="names", run_name="same") for _ in range(3))
    for tracker in (first, second):
        tracker.run_started(small.context())
        tracker.log_metrics(1, {"loss": 1.0})
        tracker.run_finished(Outcome("finished", 1))
    resumed.load_state_dict(first.state_dict())
    with pytest.raises(PluginError, match="has a newer run of the name 'same'"):
        resumed.run_started(small.context(resume_step=1))


def test_a_run_that_is_no_longer_there_is_named(tmp_path):
    tracker = made(project="gone")
    tracker.load_state_dict({"id": "0" * 32, "name": "gone"})
    with pytest.raises(PluginError, match="tracker 'trackio' cannot start: Run 'gone' does not exist in project 'gone'"):
        tracker.run_started(SmallRun(tmp_path).context(resume_step=2))


def test_a_server_without_a_token_is_refused_and_one_that_is_not_there_is_told(tmp_path, folder, monkeypatch):
    small = SmallRun(tmp_path)
    monkeypatch.delenv("TRACKIO_WRITE_TOKEN", raising=False)
    with pytest.raises(PluginError, match="Self-hosted logging requires a write token"):
        made(server_url="http://127.0.0.1:9").run_started(small.context())
    tracker = made(project="unsent", server_url="http://127.0.0.1:9/?write_token=x")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        tracker.run_started(small.context())
        tracker.log_metrics(1, {"loss": 0.25})
        tracker.run_finished(Outcome("finished", 1))
    assert any("could not" in str(warning.message).lower() for warning in told)
