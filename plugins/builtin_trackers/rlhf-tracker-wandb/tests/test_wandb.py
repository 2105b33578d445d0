"""wandb for real, offline: what it wrote is read back from its own files."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rlhf_authoring.trackers import HOSTILE_TEXT, ODD_METRICS, SmallRun, logged_metrics, odd_trajectories, trajectory
from rlhf_tracker_wandb import WandB

from rlhf_host import Outcome, PluginError


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallRun:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    return SmallRun(tmp_path)


def made(**options) -> WandB:
    return WandB(WandB.Options(mode="offline", **options))


def records(run_dir: Path) -> Iterator[tuple[str, object]]:
    """Run id and record, from the offline files: a 7-byte header, then LevelDB log chunks in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb")):
        content, at, parts = path.read_bytes(), 7, b""
        while at + 7 <= len(content):
            left = 32768 - at % 32768
            if left < 7:
                at += left
                continue
            _, size, kind = struct.unpack_from("<IHB", content, at)
            parts += content[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):  # whole, or last chunk
                record, parts = Record(), parts
                record.ParseFromString(parts)
                parts = b""
                yield path.stem.removeprefix("run-"), record


def history(run_dir: Path) -> list[tuple[str, dict]]:
    rows = []
    for run_id, record in records(run_dir):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append((run_id, {**items, "_step": record.history.step.num}))
    return rows


def settings(run_dir: Path) -> dict:
    """Configurations of the runs, as the first of each says."""
    runs = [record.run for _, record in records(run_dir) if record.WhichOneof("record_type") == "run"]
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in runs[0].config.update}


def tables(run_dir: Path, split: str) -> list[dict]:
    return [json.loads(path.read_text()) for path in run_dir.glob(f"wandb/offline-run-*/files/media/table/{split}/*.json")]


def test_a_run_by_command_line_is_in_wandb_as_in_its_own_files(small):
    small.train("--train.steps", "3", "--wandb.mode", "offline", "--wandb.project", "sums", "--wandb.every", "1")
    own = logged_metrics(small.run_dir)
    assert sorted(own) == [0, 1, 2, 3]
    found: dict[int, dict[str, float]] = {step: {} for step in own}
    for _, row in history(small.run_dir):
        kept = {name: value for name, value in row.items() if name in own[row["_step"]]}
        found[row["_step"]].update(kept)
    assert found == own
    assert settings(small.run_dir)["train"]["steps"] == 3
    assert (len(tables(small.run_dir, "train")), len(tables(small.run_dir, "eval"))) == (3, 2)


def test_an_offline_run_holds_metrics_and_samples_and_a_resumed_one_goes_on_in_it(small):
    import wandb

    first = made(project="proof", tags=["a"], every=1)
    first.run_started(small.context(half="half a character: \ud800"))
    first.log_metrics(1, {"reward/mean": 0.25, "none": None, "list": [1, 2], "big": 10**400, "nan": ODD_METRICS["nan"]})
    first.log_trajectories(1, "train", [trajectory() for _ in range(4)] + odd_trajectories())
    first.log_metrics(2, {"reward/mean": 0.5})
    state = first.state_dict()
    first.run_finished(Outcome("interrupted", 2))

    second = made(project="proof")
    second.load_state_dict(state)
    second.run_started(small.context(resume_step=2))
    second.log_metrics(3, {"reward/mean": 0.75})
    second.run_finished(Outcome("finished", 3))
    # finish() may return shortly before wandb's own process has closed the file; teardown, as at exit, waits for that process.
    wandb.teardown()

    rows = history(small.run_dir)
    found = [(row["_step"], row["reward/mean"]) for _, row in rows if "reward/mean" in row]
    assert found == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert {run_id for run_id, _ in rows} == {state["id"]}
    assert settings(small.run_dir)["half"] == "half a character: \\ud800"
    (table,) = tables(small.run_dir, "train")
    columns = ["step", "prompt", "completion", "label", "reward", "score", "advantage", "finish_reason", "length"]
    assert table["columns"] == columns
    assert table["data"][0] == [1, "2+3=", "5", "5", 1.0, 1.0, None, "stop", 1]
    assert len(table["data"]) == 9
    assert HOSTILE_TEXT.replace("\ud800", "\\ud800") in [row[2] for row in table["data"]]


def test_a_missing_package_is_named_with_its_install_line(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(PluginError, match="needs the package wandb: pip install wandb"):
        made().run_started(small.context())


def test_importing_it_imports_neither_wandb_nor_torch():
    code = 'import sys, rlhf_tracker_wandb; print({"wandb", "torch"} & set(sys.modules))'
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == "set()\n", found.stderr
