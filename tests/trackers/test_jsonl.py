"""metrics.jsonl and the trajectory files are strict JSON, whole, and exact after a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_host.errors import UserError
from rlhf_host.records.needs import Outcome
from rlhf_host.trackers.jsonl import JsonLines


def strict(path: Path) -> list[dict]:
    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


@pytest.fixture
def tracker():
    made = JsonLines(None)
    yield made
    made.run_finished(Outcome("finished", 0))


def test_each_call_adds_a_row_that_is_on_disk_at_once(tracker, context, tmp_path):
    tracker.run_started(context())
    tracker.log_metrics(1, {"reward/mean": 0.25, "lr": 1e-6})
    assert [{**row, "time/wall": 0} for row in strict(tmp_path / "run/metrics.jsonl")] == [
        {"reward/mean": 0.25, "lr": 1e-6, "step": 1, "time/wall": 0}
    ]
    tracker.log_metrics(2, {"reward/mean": 0.5})
    assert [row["step"] for row in strict(tmp_path / "run/metrics.jsonl")] == [1, 2]


def test_a_step_that_is_logged_again_has_one_row(tracker, context, tmp_path):
    """Its checkpoint was written before its row, and the run was killed before the next one."""
    tracker.run_started(context())
    for step in (1, 2, 3):
        tracker.log_metrics(step, {"loss": float(step)})
    tracker.run_finished(Outcome("failed", 3))
    again = JsonLines(None)
    again.run_started(context(resume_step=2))
    again.log_metrics(2, {"loss": 7.0})
    again.log_metrics(3, {"loss": 8.0})
    again.run_finished(Outcome("finished", 3))
    assert [(row["step"], row["loss"]) for row in strict(tmp_path / "run/metrics.jsonl")] == [(1, 1.0), (2, 7.0), (3, 8.0)]


def test_values_that_json_does_not_know_become_null_or_text(tracker, context, odd_metrics, tmp_path):
    import torch

    tracker.run_started(context())
    tracker.log_metrics(1, {**odd_metrics, "tensor": torch.tensor(0.5), "tensors": torch.tensor([1.0, float("nan")])})
    (row,) = strict(tmp_path / "run/metrics.jsonl")
    assert row["nan"] is None
    assert row["inf"] is None
    assert row["text"] == "what?"
    assert row["tensor"] == 0.5
    assert row["tensors"] == [1.0, None]
    assert row["big"] == 10**400


def test_a_trajectory_row_says_what_was_asked_answered_and_given(tracker, context, trajectory, tmp_path):
    tracker.run_started(context())
    tracker.log_trajectories(1, "train", [trajectory("2+3=", "5", metrics={"format": 1.0})])
    (row,) = strict(tmp_path / "run/trajectories/train-step-000001.jsonl")
    assert row == {
        "step": 1,
        "split": "train",
        "episode_id": "episode-0",
        "group_id": "group-0",
        "source": "sums",
        "task": 3,
        "sample": 0,
        "prompt": "2+3=",
        "text": "5",
        "label": "5",
        "reward": 1.0,
        "rewards": {"math": 1.0},
        "score": 1.0,
        "finish_reason": "stop",
        "length": 1,
        "metrics": {"format": 1.0},
    }


def test_several_turns_are_written_with_their_observations(tracker, context, trajectory, tmp_path):
    tracker.run_started(context())
    tracker.log_trajectories(1, "train", [trajectory("q", "look", observation=" seen ")])
    (row,) = strict(tmp_path / "run/trajectories/train-step-000001.jsonl")
    assert (row["text"], row["full_text"]) == ("lookdone", "look seen done")


def test_tokens_are_written_only_when_asked_for(tracker, context, trajectory, tmp_path):
    tracker.run_started(context(trajectories={"tokens": True}))
    tracker.log_trajectories(1, "train", [trajectory("ab", "c")])
    (row,) = strict(tmp_path / "run/trajectories/train-step-000001.jsonl")
    assert row["segments"] == [
        {"kind": "prompt", "token_ids": [97, 98], "logprobs": None, "versions": None},
        {"kind": "action", "token_ids": [99], "logprobs": [-0.5], "versions": [7]},
    ]


def test_limits_come_from_the_configuration(tracker, context, trajectory, tmp_path):
    tracker.run_started(context(trajectories={"every": 2, "max_per_step": 3}))
    many = [trajectory(sample=i) for i in range(8)]
    for step in (1, 2, 3):
        tracker.log_trajectories(step, "train", many)
        tracker.log_trajectories(step, "eval", many[:1])
    found = sorted(path.name for path in (tmp_path / "run/trajectories").iterdir())
    assert found == ["eval-step-000001.jsonl", "eval-step-000002.jsonl", "eval-step-000003.jsonl", "train-step-000002.jsonl"]
    rows = strict(tmp_path / "run/trajectories/train-step-000002.jsonl")
    assert [row["sample"] for row in rows] == [0, 1, 2]


def test_every_zero_writes_no_trajectories(tracker, context, trajectory, tmp_path):
    tracker.run_started(context(trajectories={"every": 0}))
    tracker.log_trajectories(0, "eval", [trajectory()])
    assert not (tmp_path / "run/trajectories").exists()


def test_odd_trajectories_are_written_strictly(tracker, context, nasty, odd_trajectories, tmp_path):
    tracker.run_started(context(trajectories={"tokens": True}))
    tracker.log_trajectories(1, "train", odd_trajectories)
    hostile, undecodable, chat, unjudged, bare = strict(tmp_path / "run/trajectories/train-step-000001.jsonl")
    assert hostile["text"] == nasty
    assert hostile["reward"] is None
    assert (undecodable["prompt"], undecodable["text"]) == ("2+3=", "")
    assert chat["prompt"] == "hello"
    assert chat["label"] == {"answer": [1, 2], "path": "x"}
    assert (unjudged["reward"], unjudged["rewards"], unjudged["unjudged"]) == (
        None,
        {"math": None},
        "timed out after 5 s",
    )
    assert (bare["prompt"], bare["length"]) == ("", 0)


def test_a_resumed_run_drops_later_rows_and_a_torn_line(tracker, context, tmp_path):
    path = tmp_path / "run/metrics.jsonl"
    path.parent.mkdir()
    path.write_text("".join(f'{{"step": {step}, "loss": 0.5}}\n' for step in range(1, 7)) + '{"step": 2, "lo')
    tracker.run_started(context(resume_step=4))
    tracker.log_metrics(5, {"loss": 0.25})
    assert [row["step"] for row in strict(path)] == [1, 2, 3, 4, 5]
    assert [entry.name for entry in path.parent.iterdir()] == ["metrics.jsonl"]


def test_rows_that_are_missing_are_said_aloud(tracker, context, tmp_path, caplog):
    path = tmp_path / "run/metrics.jsonl"
    path.parent.mkdir()
    path.write_text('{"step": 1}\n{"st\x00p": 2}\nnonsense\n{"step": 4}\n')
    tracker.run_started(context(resume_step=5))
    assert [row["step"] for row in strict(path)] == [1, 4]
    tracker.log_metrics(5, {})  # of a run that was stopped between the step and its row
    tracker.log_metrics(6, {})
    assert caplog.messages == [f"{path} lacks the rows of 2 steps, from step 2 to step 3"]


def test_the_row_of_the_checkpoint_itself_is_missed_too(tracker, context, tmp_path, caplog):
    path = tmp_path / "run/metrics.jsonl"
    path.parent.mkdir()
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    tracker.run_started(context(resume_step=2))
    tracker.log_metrics(3, {})
    path.unlink()
    tracker.run_started(context(resume_step=3))
    tracker.log_metrics(4, {})
    lacks = f"{path} lacks the rows of "
    assert caplog.messages == [f"{lacks}1 steps, from step 2 to step 2", f"{lacks}3 steps, from step 1 to step 3"]


def test_what_no_tracker_wrote_is_a_lost_row_or_one_clear_line(tracker, context, tmp_path):
    path = tmp_path / "run/metrics.jsonl"
    path.parent.mkdir()
    path.write_text("[" * 100_000 + "\n")
    tracker.run_started(context(resume_step=1))
    assert path.read_text() == ""
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=f"^{path} cannot be used: Is a directory; move it away or fix it$"):
        tracker.run_started(context(resume_step=1))


def test_a_run_resumed_before_its_first_checkpoint_starts_over(tracker, context, tmp_path):
    path = tmp_path / "run/metrics.jsonl"
    path.parent.mkdir()
    path.write_text('{"step": 0}\n{"step": 1}\n')
    tracker.run_started(context(resume_step=-1))
    tracker.log_metrics(0, {})
    assert [row["step"] for row in strict(path)] == [0]


def test_a_run_that_is_not_resumed_keeps_what_is_there(tracker, context, tmp_path):
    path = tmp_path / "run/metrics.jsonl"
    path.parent.mkdir()
    path.write_text('{"step": 9}\n')
    tracker.run_started(context())
    assert [row["step"] for row in strict(path)] == [9]


def test_without_a_run_directory_nothing_is_written(tracker, context, trajectory, tmp_path):
    placeless = context()
    placeless.run_dir = None
    tracker.run_started(placeless)
    tracker.log_metrics(1, {"loss": 1.0})
    tracker.log_trajectories(1, "train", [trajectory()])
    assert list(tmp_path.iterdir()) == []
