"""wandb for real, offline: what it wrote is read back from its own files."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_host.errors import PluginError
from rlhf_host.records.needs import Outcome
from rlhf_host.trackers.wandb import WandB


def make(**options) -> WandB:
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


def test_an_offline_run_holds_metrics_and_samples_and_a_resumed_one_goes_on_in_it(
    context, trajectory, odd_metrics, odd_trajectories, tmp_path
):
    import wandb

    first = make(project="proof", tags=["a"], every=1)
    first.run_started(context(algo={"name": "half a character: \ud800"}))
    first.log_metrics(1, {"reward/mean": 0.25, **odd_metrics})
    first.log_trajectories(1, "train", [trajectory("2+3=", "5", sample=i) for i in range(4)] + odd_trajectories)
    first.log_metrics(2, {"reward/mean": 0.5})
    state = first.state_dict()
    first.run_finished(Outcome("interrupted", 2))

    second = make(project="proof")
    second.load_state_dict(state)
    second.run_started(context(resume_step=2))
    second.log_metrics(3, {"reward/mean": 0.75})
    second.run_finished(Outcome("finished", 3))
    # finish() may return shortly before wandb's own process has closed the file; teardown, as at exit, waits for that process.
    wandb.teardown()

    rows = history(tmp_path / "run")
    found = [(row["_step"], row["reward/mean"]) for _, row in rows if "reward/mean" in row]
    assert found == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert {run_id for run_id, _ in rows} == {state["id"]}
    (table,) = [json.loads(path.read_text()) for path in (tmp_path / "run").glob("wandb/*/files/media/table/train/*.json")]
    columns = ["step", "prompt", "completion", "label", "reward", "score", "advantage", "finish_reason", "length"]
    assert table["columns"] == columns
    assert table["data"][0] == [1, "2+3=", "5", "5", 1.0, 1.0, None, "stop", 1]
    assert len(table["data"]) == 9
    assert any("[bold red]hi" in str(row[2]) for row in table["data"])


def test_a_missing_package_is_named_with_its_install_line(context, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(PluginError, match=r"pip install 'rlhf-host\[wandb\]'"):
        make().run_started(context())


def test_importing_trackers_imports_neither_wandb_nor_torch():
    import subprocess

    code = """
import sys
from rlhf_host.trackers import console, jsonl, tensorboard, wandb
print({"wandb", "torch"} & set(sys.modules))
"""
    root = Path(__file__).resolve().parents[2]
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert found.stdout == "set()\n", found.stderr
