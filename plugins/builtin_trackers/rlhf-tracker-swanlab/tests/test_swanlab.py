"""Runs in the real SwanLab, offline, read back by its own reader and compared with the run's own files."""

from __future__ import annotations

import json
import math
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
from rlhf_tracker_swanlab import SwanLab

from rlhf_host import Outcome, PluginError

swanlab = pytest.importorskip("swanlab", reason="needs swanlab: make test-trackers")


@pytest.fixture(autouse=True)
def _no_account(monkeypatch, tmp_path_factory):
    for name in ("SWANLAB_API_KEY", "SWANLAB_MODE", "SWANLAB_LOG_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SWANLAB_SAVE_DIR", str(tmp_path_factory.mktemp("account")))


class Session:
    """Reads what one process has written, from the file that ``swanlab sync`` uploads."""

    def __init__(self, folder: Path):
        from swanlab.proto.swanlab.record.v1.record_pb2 import Record
        from swanlab.sdk.internal.core_python.store import DataStoreReader

        self.folder = folder
        (path,) = folder.glob("*.swanlab")
        reader = DataStoreReader()
        reader.open(path)
        self.records = [Record.FromString(content) for content in reader]
        reader.close()

    def one(self, kind: str) -> Any:
        (found,) = [getattr(record, kind) for record in self.records if record.HasField(kind)]
        return found

    def ends(self) -> list[Any]:
        return [record.finish for record in self.records if record.HasField("finish")]

    def metrics(self) -> dict[int, dict[str, float]]:
        """Step → metrics. Each is there once."""
        found: dict[int, dict[str, float]] = {}
        for record in self.records:
            if record.HasField("scalar") and not record.scalar.key.startswith("__swanlab__"):
                row = found.setdefault(record.scalar.step, {})
                assert record.scalar.key not in row
                row[record.scalar.key] = record.scalar.value.number
        return found

    def tables(self) -> dict[tuple[int, str], list[dict[str, Any]]]:
        found = {}
        for record in self.records:
            if record.HasField("media"):
                (item,) = record.media.value.items
                content = json.loads((self.folder / "media/echarts" / item.filename).read_text("utf-8"))
                found[record.media.step, record.media.key] = content["rowData"]
        return found

    def settings(self) -> dict[str, Any]:
        import yaml

        config = yaml.safe_load((self.folder / "files/config.yaml").read_text("utf-8"))
        return {name: entry["value"] for name, entry in config.items()}


def sessions(run_dir: Path) -> list[Session]:
    return [Session(path) for path in sorted(run_dir.glob("swanlab/run-*"))]


def made(**options: Any) -> SwanLab:
    return SwanLab(SwanLab.Options(**{"mode": "offline"} | options))


def test_a_run_by_command_line_is_in_swanlab_as_in_its_own_files(tmp_path):
    options = ("--swanlab.mode", "offline", "--swanlab.group", "ä", "--swanlab.tags", "a,b", "--swanlab.every", "1")
    SmallRun(tmp_path).train("--train.steps", "3", "--swanlab.project", "sums", *options)
    (found,) = sessions(tmp_path / "run")
    start = found.one("start")
    assert (start.project, start.name, start.group, list(start.tags)) == ("sums", "run", "ä", ["a", "b"])
    assert found.metrics() == logged_metrics(tmp_path / "run")
    assert found.settings()["train"]["steps"] == 3
    assert found.one("finish").state == start_state("FINISHED")
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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def start_state(name: str) -> int:
    from swanlab.proto.swanlab.run.v1 import run_pb2

    return int(run_pb2.RunState.Value(f"RUN_STATE_{name}"))


def test_a_killed_run_goes_on_in_the_same_run(tmp_path):
    small = SmallRun(tmp_path)
    small.train("--train.steps", "5", "--swanlab", KILL_AFTER="4", code=-9, SWANLAB_MODE="offline")
    (killed,) = sessions(tmp_path / "run")
    assert killed.ends() == []
    small.rlhf("train", "--resume", "run", "--train.steps", "5", SWANLAB_MODE="offline")
    first, second = sessions(tmp_path / "run")
    assert second.one("start").id == first.one("start").id
    assert second.one("finish").state == start_state("FINISHED")
    own = logged_metrics(tmp_path / "run")
    # Step 3 came after the checkpoint: `swanlab sync` of the second session skips what the run has of it.
    assert second.metrics() == {step: own[step] for step in (3, 4, 5)}
    # A process that is killed loses what SwanLab held back, up to 1.5 s, and may have written a part of a step.
    before = {step: row for step, row in first.metrics().items() if step <= 2}
    assert [row.items() <= own[step].items() for step, row in sorted(before.items())] == [True] * len(before)
    assert sorted(before) == list(range(len(before)))


def test_runs_of_one_process_are_apart_and_a_failed_one_is_marked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    finish_and_fail("swanlab", {"mode": "offline", "run_name": "short"}, {"mode": "offline"})
    ((first,), (second,)) = (sessions(tmp_path / name) for name in ("first", "second"))
    assert [found.one("start").name for found in (first, second)] == ["short", "second"]
    assert first.metrics() == logged_metrics(tmp_path / "first")
    end = second.one("finish")
    assert end.state == start_state("CRASHED")
    assert FAILURE in end.error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


def test_odd_metrics_texts_and_settings_are_kept(tmp_path):
    tracker = made(every=1)
    tracker.run_started(SmallRun(tmp_path).context(long="ü" * 9000, nested={"a b": {"c?": [1, None]}}, half="\ud800"))
    tracker.log_metrics(1, ODD_METRICS)
    tracker.log_trajectories(1, "train", [trajectory(HOSTILE_TEXT, HOSTILE_TEXT), trajectory()])
    tracker.log_trajectories(2, "train", [])
    tracker.run_finished(Outcome("interrupted", 2))
    (found,) = sessions(tmp_path / "run")
    assert found.one("finish").state == start_state("ABORTED")
    ((step, values),) = found.metrics().items()
    assert step == 1
    assert math.isnan(values.pop("nan"))
    assert values.pop("inf") == math.inf
    # Dots and slashes at the ends of a name are cut by SwanLab.
    expected = {name: value for name, value in ODD_METRICS.items() if name not in ("nan", "inf", "text")}
    expected = {name.strip("./"): value for name, value in expected.items()}
    assert values == expected
    assert found.settings() == {"long": "ü" * 9000, "nested": {"a b": {"c?": [1, None]}}, "half": "\\ud800"}
    ((_, table),) = found.tables().items()
    assert [row["completion"] for row in table] == [HOSTILE_TEXT.replace("\ud800", "\\ud800"), "5"]


def test_a_dry_run_writes_nothing(tmp_path):
    SmallRun(tmp_path).train("--train.steps", "3", "--swanlab.mode", "offline", "--dry-run")
    assert list(tmp_path.iterdir()) == []


def test_online_without_a_key_asks_nothing_and_ends_the_run_before_it_begins(tmp_path):
    with pytest.raises(PluginError, match=r"no API key was provided.*swanlab login, or use --tracker.swanlab.mode offline"):
        made(mode=None).run_started(SmallRun(tmp_path).context())


def test_a_host_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("SWANLAB_API_KEY", "k" * 21)
    monkeypatch.setenv("SWANLAB_API_HOST", "http://127.0.0.1:9")
    monkeypatch.setenv("SWANLAB_WEB_HOST", "http://127.0.0.1:9")
    with pytest.raises(PluginError, match="tracker 'swanlab' cannot start"):
        made(mode="online").run_started(SmallRun(tmp_path).context())


def test_a_project_that_swanlab_refuses_is_named(tmp_path):
    with pytest.raises(PluginError, match=r"project\.name"):
        made(project="two words").run_started(SmallRun(tmp_path).context())
