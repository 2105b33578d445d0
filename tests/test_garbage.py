"""What a process has loaded is left out of Python's garbage collections while a run goes on, and only so long."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest

from rlhf_host import garbage
from rlhf_host.garbage import frozen

from . import schedule


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch):
    monkeypatch.setattr(garbage, "_stays", False)
    gc.unfreeze()
    yield
    gc.freeze()


class Ring:
    def __init__(self):
        self.self = self


def test_what_was_alive_is_left_out_and_what_is_made_inside_is_collected():
    kept = [Ring() for _ in range(10)]
    with frozen():
        assert gc.get_freeze_count() > 10
        assert not any(isinstance(thing, Ring) for thing in gc.get_objects())
        Ring()
        assert gc.collect() >= 1
    assert gc.get_freeze_count() == 0
    del kept
    assert gc.collect() >= 10


def test_a_failure_ends_it_too():
    with pytest.raises(ValueError, match="as intended"), frozen():
        raise ValueError("as intended")
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_froze_stays_frozen():
    kept = Ring()
    gc.freeze()
    with frozen():
        later = Ring()
        assert any(thing is later for thing in gc.get_objects())
    assert not any(thing is kept for thing in gc.get_objects())


def test_files_of_tests_leave_it_frozen():
    """vLLM ends with ``gc.unfreeze``: without this, each later run of the same process would begin with a search of everything."""
    one, same, other = (SimpleNamespace(nodeid=nodeid) for nodeid in ("a.py::x", "a.py::y", "b.py::x"))
    schedule.pytest_runtest_teardown(one, same)
    assert gc.get_freeze_count() == 0
    schedule.pytest_runtest_teardown(one, other)
    assert gc.get_freeze_count() > 10_000


def test_a_run_is_frozen_and_its_notebook_is_not(rlhf_here, small_run, tmp_path, monkeypatch):
    from rlhf_host.training.loop import Loop

    counts, take = [], Loop._take_step
    monkeypatch.setattr(Loop, "_take_step", lambda loop, number: counts.append(gc.get_freeze_count()) or take(loop, number))
    assert rlhf_here(*small_run, "--run-dir", tmp_path / "run").exit_code == 0
    assert min(counts) > 100_000
    assert gc.get_freeze_count() == 0
