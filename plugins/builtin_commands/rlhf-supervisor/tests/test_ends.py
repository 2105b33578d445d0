"""How an end is read: the last step, equal errors, kills for lack of memory."""

from __future__ import annotations

import json
import time

import pytest
from rlhf_supervisor.ends import Attempt, End, last_step, memory_kills, newest_checkpoint


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ((1, "tried to allocate 2.31 GiB in process 4711", 7), (1, "tried to allocate 2.35 GiB in process 812", 7), True),
        ((1, "lost at 0x7f31aa", 7), (1, "lost at 0x7f00bb", 7), True),
        ((1, "lost", 7), (1, "lost", 8), False),
        ((1, "no room", 7), (1, "no reward", 7), False),
        ((-9, "killed", None), (-9, "killed", 0), False),
    ],
)
def test_the_same_error_is_one_with_other_numbers_at_the_same_step(one, other, same):
    assert End(*one).same(End(*other)) is same
    assert not End(*one).same(None)


@pytest.mark.parametrize(
    ("about", "code"),
    [
        ({"status": "finished"}, 0),
        ({"status": "interrupted"}, 130),
        ({"status": "finished", "error": "model/ cannot be written"}, -6),
        ({"status": "failed", "error": "lost"}, -6),
        ({"status": "running"}, -6),
    ],
)
def test_a_run_that_is_over_is_over_whatever_its_process_dies_of(tmp_path, about, code):
    attempt = Attempt(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(about | {"ended": time.time()}))
    assert attempt.end(130).code == (0 if code == 0 else 130)
    end = attempt.end(-6)
    assert (end.code, end.what) == (code, "it was ended by SIGABRT")
    assert Attempt(tmp_path).end(-6).step is None  # what is noted there is of the one before


def test_the_exit_code_is_that_of_a_shell():
    assert [End(code, "", 1).exit_code for code in (0, 1, -9, -15)] == [0, 1, 137, 143]


def test_the_last_step_is_that_of_whole_rows(tmp_path):
    assert last_step(tmp_path) == 0
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n{"step": 4}\n{"ste')
    assert last_step(tmp_path) == 4
    for name in ("step-000002", "step-000010", ".step-000011", "step-000012.replaced", "last"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_checkpoint(tmp_path) == 10
    assert last_step(tmp_path) == 10


def test_kills_for_lack_of_memory_are_those_of_the_own_cgroup_and_the_machine(tmp_path):
    assert memory_kills(tmp_path) == {}
    for path, text in {
        "proc/self/cgroup": "1:name=systemd:/x\n0::/job/step\n",
        "proc/vmstat": "nr_free_pages 1\noom_kill 5\n",
        "sys/fs/cgroup/job/step/memory.events": "low 0\noom 3\noom_kill 2\noom_group_kill 0\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert memory_kills(tmp_path) == {"cgroup": 2, "machine": 5}
