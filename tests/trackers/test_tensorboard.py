"""TensorBoard's own reader finds the scalars and the sample text."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlhf_host.errors import PluginError
from rlhf_host.records.needs import Outcome
from rlhf_host.trackers.tensorboard import TensorBoard


@pytest.fixture
def make():
    return lambda **options: TensorBoard(TensorBoard.Options(**options))


def read(run_dir: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return events


def scalars(run_dir: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(run_dir).Scalars(name)]


def test_scalars_and_samples_can_be_read_back(make, context, trajectory, tmp_path):
    tracker = make()
    tracker.run_started(context(trajectories={"show": 1}))
    for step in (1, 2):
        tracker.log_metrics(step, {"reward/mean": step / 4})
        tracker.log_trajectories(step, "train", [trajectory("2+3=", "5 `x`\n<b>")])
    tracker.run_finished(Outcome("finished", 2))
    events = read(tmp_path / "run")
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    (sample,) = events.Tensors("train/sample_0/text_summary")
    text = sample.tensor_proto.string_val[0].decode()
    assert "**completion**\n\n    5 `x`\n    <b>\n" in text
    assert "**reward**\n\n    1" in text


def test_metrics_are_on_disk_after_each_step(make, context, tmp_path):
    tracker = make()
    tracker.run_started(context())
    tracker.log_metrics(1, {"loss": 0.5})
    assert scalars(tmp_path / "run", "loss") == [(1, 0.5)]
    tracker.run_finished(Outcome("failed", 1))


def test_a_resumed_run_hides_what_came_after_its_checkpoint(make, context, tmp_path):
    first = make()
    first.run_started(context())
    for step in (1, 2, 3, 4):
        first.log_metrics(step, {"loss": 1.0})
    first.run_finished(Outcome("failed", 4))
    second = make()
    second.run_started(context(resume_step=2))
    second.log_metrics(3, {"loss": 0.0})
    second.run_finished(Outcome("finished", 3))
    assert scalars(tmp_path / "run", "loss") == [(1, 1.0), (2, 1.0), (3, 0.0)]


def test_odd_values_do_not_stop_a_run(make, context, odd_metrics, odd_trajectories, tmp_path):
    tracker = make()
    tracker.run_started(context(trajectories={"show": 9}))
    tracker.log_metrics(1, odd_metrics)
    tracker.log_trajectories(1, "train", odd_trajectories)
    tracker.log_trajectories(1, "train", [])
    tracker.run_finished(Outcome("finished", 1))
    assert math.isnan(read(tmp_path / "run").Scalars("nan")[0].value)


def test_a_missing_package_is_named_with_its_install_line(make, context, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(PluginError, match=r"tensorboard.*pip install 'rlhf-host\[tensorboard\]'"):
        make().run_started(context())
