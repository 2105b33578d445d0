"""Runs in the real ClearML, offline, read back from the sessions that it uploads and compared with the run's own files."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from rlhf_authoring.trackers import (
    HOSTILE_TEXT,
    ODD_METRICS,
    logged_metrics,
    logged_trajectories,
    trajectory,
)
from rlhf_tracker_clearml import ClearML

from rlhf_host import Outcome, PluginError


class Session:
    """An offline session, as ``Task.import_offline_session`` reads it."""

    def __init__(self, folder: Path):
        self.id = folder.name
        self.task = json.loads((folder / "task.json").read_text("utf-8"))
        self.events = []
        if (folder / "metrics.jsonl").exists():
            lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
            self.events = [event for line in lines for event in json.loads(line)]

    def metrics(self) -> dict[int, dict[str, float]]:
        """Step → metrics, each there once, without what ClearML measures of the machine."""
        found: dict[int, dict[str, float]] = {}
        for event in self.events:
            if event["type"] == "training_stats_scalar" and not event["metric"].startswith(":"):
                title, series = event["metric"], event["variant"]
                name = title if series == title else f"{title}/{series}"
                row = found.setdefault(event["iter"], {})
                assert name not in row
                row[name] = event["value"]
        return found

    def tables(self) -> dict[tuple[int, str], list[dict[str, Any]]]:
        found = {}
        for event in self.events:
            if event["type"] == "plot":
                ((plot,), key) = json.loads(event["plot_str"])["data"], (event["iter"], event["metric"])
                columns = plot["header"]["values"]
                found[key] = [dict(zip(columns, row, strict=True)) for row in zip(*plot["cells"]["values"], strict=True)]
        return found

    def settings(self) -> dict[str, str]:
        entries = self.task["hyperparams"]["rlhf"]
        return {name: entry.get("value", "") for name, entry in entries.items()}


def sessions(run_dir: Path) -> list[Session]:
    folders = [path for path in run_dir.glob("clearml/offline/*") if path.is_dir()]
    return [Session(path) for path in sorted(folders, key=lambda path: path.stat().st_ctime)]


def made(**options: Any) -> ClearML:
    return ClearML(ClearML.Options(**{"mode": "offline"} | options))


def test_a_run_by_command_line_is_in_clearml_as_in_its_own_files(small, tmp_path, home):
    options = ("--clearml.mode", "offline", "--clearml.tags", "a,b", "--clearml.every", "1")
    small.train("--train.steps", "3", "--clearml.project", "sums/ä", *options)
    (found,) = sessions(tmp_path / "run")
    assert (found.task["project_name"], found.task["name"], sorted(found.task["tags"])) == ("sums/ä", "run", ["a", "b"])
    assert zipfile.is_zipfile(tmp_path / f"run/clearml/offline/{found.id}.zip")
    assert found.metrics() == logged_metrics(tmp_path / "run")
    assert found.settings()["train/steps"] == "3"
    tables = found.tables()
    assert sorted(tables) == [(0, "eval"), (1, "train"), (2, "train"), (3, "eval"), (3, "train")]
    own = logged_trajectories(tmp_path / "run", "train", 3)
    assert [(row["reward"], row["advantage"], row["length"]) for row in tables[3, "train"]] == [
        (row["reward"], row["advantage"], row["length"]) for row in own
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    assert [path.name for path in home.rglob("*") if path.is_file()] == [".session.json"]


def test_a_killed_run_goes_on_in_a_session_of_its_own(small, tmp_path):
    small.train("--train.steps", "5", "--clearml", KILL_AFTER="4", code=-9, CLEARML_OFFLINE_MODE="1")
    (killed,) = sessions(tmp_path / "run")
    small.rlhf("train", "--resume", "run", "--train.steps", "5", CLEARML_OFFLINE_MODE="1")
    first, second = sessions(tmp_path / "run")
    assert first.id == killed.id
    own = logged_metrics(tmp_path / "run")
    # Step 3 came after the checkpoint, and is in both.
    assert second.metrics() == {step: own[step] for step in (3, 4, 5)}


def test_runs_of_one_process_are_apart_and_a_failed_one_is_marked(small, tmp_path):
    offline = "{'mode': 'offline'}"
    begin = "from rlhf_authoring.trackers import finish_and_fail"
    small.python("-c", f"{begin}; finish_and_fail('clearml', {offline}, {offline})")
    ((first,), (second,)) = (sessions(tmp_path / name) for name in ("first", "second"))
    assert (first.task["name"], first.task.get("tags", [])) == ("first", [])
    assert (second.task["name"], second.task["tags"]) == ("second", ["failed"])
    assert first.metrics() == logged_metrics(tmp_path / "first")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


def test_odd_metrics_texts_and_settings_are_kept(small, tmp_path):
    tracker = made(every=1)
    tracker.run_started(small.context(long="ü" * 9000, nested={"a b": {"c?": [1, None]}}, half="\ud800"))
    tracker.log_metrics(1, ODD_METRICS)
    tracker.log_trajectories(1, "train", [trajectory(HOSTILE_TEXT, HOSTILE_TEXT), trajectory()])
    tracker.log_trajectories(2, "train", [])
    tracker.run_finished(Outcome("interrupted", 2))
    assert "CLEARML_CACHE_DIR" not in os.environ
    (found,) = sessions(tmp_path / "run")
    assert found.task["tags"] == ["interrupted"]
    # What is not finite is left out: ClearML would show 0.
    expected = {name: value for name, value in ODD_METRICS.items() if name not in ("nan", "inf", "text")}
    assert found.metrics() == {1: expected}
    assert found.settings() == {"long": "ü" * 9000, "nested/a b/c?": "[1, null]", "half": "\\ud800"}
    ((_, table),) = found.tables().items()
    assert [row["completion"] for row in table] == [HOSTILE_TEXT.replace("\ud800", "\\ud800"), "5"]


def test_a_dry_run_writes_nothing(small, tmp_path, home):
    small.train("--train.steps", "3", "--clearml.mode", "offline", "--dry-run")
    assert list(tmp_path.iterdir()) == []
    assert list(home.iterdir()) == []


def test_online_without_a_server_asks_nothing_and_ends_the_run_before_it_begins(small, tmp_path):
    said = small.train("--train.steps", "3", "--clearml", code=2).stderr
    (line,) = [line for line in said.splitlines() if line.startswith("Error")]
    assert "ClearML is not configured on this machine" in line
    assert line.endswith("run clearml-init, or use --tracker.clearml.mode offline")
    assert "Traceback" not in said
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_missing_package_is_named_with_its_install_line(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "clearml", None)
    with pytest.raises(PluginError, match="pip install clearml"):
        made().run_started(small.context())
