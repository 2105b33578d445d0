"""TensorBoard's own reader finds the scalars and the sample text."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rlhf_authoring.trackers import (
    HOSTILE_TEXT,
    ODD_METRICS,
    SmallRun,
    logged_metrics,
    logged_trajectories,
    odd_trajectories,
    trajectory,
)
from rlhf_tracker_tensorboard import TensorBoard

from rlhf_host import Outcome, PluginError


@pytest.fixture
def small(tmp_path: Path) -> SmallRun:
    return SmallRun(tmp_path)


def made(**options) -> TensorBoard:
    return TensorBoard(TensorBoard.Options(**options))


def read(run_dir: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return events


def scalars(run_dir: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(run_dir).Scalars(name)]


def text(events, name: str) -> dict[int, str]:
    """Step → the text of a sample."""
    return {event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors(f"{name}/text_summary")}


def test_a_run_by_command_line_is_in_tensorboard_as_in_its_own_files(small):
    small.train("--train.steps", "3", "--tensorboard.every", "1", "--trajectories.show", "1")
    events, own = read(small.run_dir), logged_metrics(small.run_dir)
    assert sorted(own) == [0, 1, 2, 3]
    found: dict[int, dict[str, float]] = {step: {} for step in own}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            if name != "time/wall" and math.isfinite(event.value):
                found[event.step][name] = event.value
    assert found == {step: pytest.approx(values, rel=1e-6) for step, values in own.items()}
    samples = text(events, "train/sample_0")
    assert sorted(samples) == [1, 2, 3]
    row = logged_trajectories(small.run_dir, "train", 3)[0]
    written = row["text"] + "<eos>" * (row["finish_reason"] == "stop")
    assert f"**completion**\n\n    {written}\n\n**label**" in samples[3]
    assert sorted(text(events, "eval/sample_0")) == [0, 3]


def test_scalars_and_samples_can_be_read_back(small):
    tracker = made()
    tracker.run_started(small.context(trajectories={"show": 1}))
    for step in (1, 2):
        tracker.log_metrics(step, {"reward/mean": step / 4})
        tracker.log_trajectories(step, "train", [trajectory("2+3=", "5 `x`\n<b>")])
    tracker.run_finished(Outcome("finished", 2))
    events = read(small.run_dir)
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    (sample,) = text(events, "train/sample_0").values()
    assert "**completion**\n\n    5 `x`\n    <b>\n" in sample
    assert "**reward**\n\n    1" in sample


def test_metrics_are_on_disk_after_each_step(small):
    tracker = made()
    tracker.run_started(small.context())
    tracker.log_metrics(1, {"loss": 0.5})
    assert scalars(small.run_dir, "loss") == [(1, 0.5)]
    tracker.run_finished(Outcome("failed", 1))


def test_a_resumed_run_hides_what_came_after_its_checkpoint(small, monkeypatch):
    first = made()
    first.run_started(small.context())
    for step in (1, 2, 3, 4):
        first.log_metrics(step, {"loss": 1.0})
    first.run_finished(Outcome("failed", 4))
    # TensorBoard reads files by their names, which have whole seconds: no run is resumed in the second in which it began.
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 2)
    second = made()
    second.run_started(small.context(resume_step=2))
    second.log_metrics(3, {"loss": 0.0})
    second.run_finished(Outcome("finished", 3))
    assert scalars(small.run_dir, "loss") == [(1, 1.0), (2, 1.0), (3, 0.0)]


def test_odd_values_do_not_stop_a_run(small):
    tracker = made()
    tracker.run_started(small.context(trajectories={"show": 9}))
    tracker.log_metrics(1, {**ODD_METRICS, "none": None, "list": [1, 2], "big": 10**400})
    tracker.log_trajectories(1, "train", odd_trajectories())
    tracker.log_trajectories(1, "train", [])
    tracker.run_finished(Outcome("finished", 1))
    events = read(small.run_dir)
    assert math.isnan(events.Scalars("nan")[0].value)
    assert not {"text", "none", "list", "big"} & {*events.Tags()["scalars"]}
    samples = [text(events, f"train/sample_{place}")[1] for place in range(5)]
    # Nothing that a model wrote is rendered, or moves a cursor.
    assert f"\\x1b[2J<b>bold</b> \\x00 \\ud800 \\u202e ✓,{'x' * 9}" in samples[0]
    assert not set(HOSTILE_TEXT) & set("\x1b\x00\u202e") & set(samples[0])
    assert "**reward**\n\n    unjudged" in samples[3]


def test_without_a_run_directory_it_writes_nothing(tmp_path, monkeypatch, small):
    from dataclasses import replace

    monkeypatch.chdir(tmp_path)
    tracker = made()
    tracker.run_started(replace(small.context(), run_dir=None))
    tracker.log_metrics(1, {"loss": 0.5})
    tracker.log_trajectories(1, "eval", [trajectory()])
    tracker.run_finished(Outcome("finished", 1))
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named_with_its_install_line(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(PluginError, match=r"tensorboard.*pip install tensorboard"):
        made().run_started(small.context())


def test_importing_it_imports_neither_tensorboard_nor_torch():
    code = 'import sys, rlhf_tracker_tensorboard; print({"tensorboard", "torch"} & set(sys.modules))'
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == "set()\n", found.stderr
