"""Checkpoint directories: whole or not at all, kept by rule, and only what can be read back."""

import json
from collections import deque

import numpy as np
import pytest
import torch

from rlhf_host.errors import RunError, UserError
from rlhf_host.training.checkpoints import (
    checkpoint_dirs,
    keep_checkpoints,
    load_checkpoint,
    plain_state,
    save_checkpoint,
    write_directory,
)


def save(run_dir, step, **state):
    return save_checkpoint(
        run_dir,
        step,
        state,
        {"x": torch.ones(2)},
        {"actor": lambda path: (path / "w").write_text("w")},
        lambda path: (path / "actor").mkdir(),
    )


def test_what_is_saved_comes_back(tmp_path):
    save(tmp_path, 3, version=4)
    found = load_checkpoint(tmp_path)
    assert (found.step, found.state["version"]) == (3, 4)
    assert found.tensors["x"].tolist() == [1.0, 1.0]
    assert (found.role("actor") / "w").read_text() == "w"
    assert load_checkpoint(tmp_path / "other") is None


def test_a_writer_that_fails_leaves_the_old_directory(tmp_path):
    target = tmp_path / "model"
    write_directory(target, lambda path: (path / "a").write_text("old"))

    def fails(path):
        (path / "a").write_text("new")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_directory(target, fails)
    assert (target / "a").read_text() == "old"
    write_directory(target, lambda path: (path / "b").write_text("new"))
    assert [path.name for path in target.iterdir()] == ["b"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_kill_between_the_renames_of_a_replacement_loses_nothing(tmp_path):
    path = save(tmp_path, 2, version=1)
    path.rename(path.with_name(".step-000002.old"))
    assert load_checkpoint(tmp_path).state["version"] == 1
    assert [step for step, _ in checkpoint_dirs(tmp_path)] == [2]


def test_half_written_ones_are_never_read(tmp_path):
    (tmp_path / "checkpoints" / ".step-000009.partial").mkdir(parents=True)
    save(tmp_path, 1)
    assert load_checkpoint(tmp_path).step == 1
    keep_checkpoints(tmp_path, 2, None)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_the_newest_and_the_best_are_kept(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step)
    keep_checkpoints(tmp_path, 2, best_step=1)
    assert [step for step, _ in checkpoint_dirs(tmp_path)] == [1, 4, 5]
    keep_checkpoints(tmp_path, 0, None)
    assert len(checkpoint_dirs(tmp_path)) == 3


def test_damage_is_named(tmp_path):
    path = save(tmp_path, 1)
    (path / "trainer.pt").write_bytes(b"nonsense")
    with pytest.raises(UserError, match="is damaged"):
        load_checkpoint(tmp_path)
    path = save(tmp_path, 2)
    (path / "state.json").write_text(json.dumps({"format": 99, "step": 2}))
    with pytest.raises(UserError, match="checkpoint format 99"):
        load_checkpoint(tmp_path)


def test_plugin_state_is_made_plain_or_refused_when_it_is_saved():
    state = {"a": np.float64(0.5), "b": [np.int64(3), (1, "x")], "c": np.arange(2), "d": torch.zeros(1)}
    plain = plain_state(state, "algo:x")
    assert type(plain["a"]) is float
    assert type(plain["b"][0]) is int
    assert plain["c"].tolist() == [0, 1]
    with pytest.raises(RunError, match="algo:x gives a deque in state_dict"):
        plain_state({"a": deque()}, "algo:x")
