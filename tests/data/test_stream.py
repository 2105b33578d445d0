"""The order in which tasks are drawn."""

import json
import random
from collections import Counter

import pytest

from rlhf_host.data.stream import TaskSet, TaskStream
from rlhf_host.errors import UserError
from rlhf_host.records.episodes import Task


def taskset(**sizes_and_weights):
    tasks = [Task(f"{name}{i}", index=i, source=name) for name, (size, _) in sizes_and_weights.items() for i in range(size)]
    sources = {name: [task for task in tasks if task.source == name] for name in sizes_and_weights}
    return TaskSet(sources, {name: weight for name, (_, weight) in sizes_and_weights.items()})


def draw(stream, count):
    return [drawn.task.prompt for drawn in stream.draw(count, 1)]


def test_every_task_comes_once_per_epoch_and_epochs_differ_in_order():
    stream = TaskStream(taskset(a=(20, 1.0)), seed=0)
    first, second = draw(stream, 20), draw(stream, 20)
    assert sorted(first) == sorted(second) == sorted(f"a{i}" for i in range(20))
    assert first != second


def test_the_order_is_fixed_by_the_seed_and_by_nothing_else():
    random.seed(1)
    once = draw(TaskStream(taskset(a=(20, 1.0), b=(5, 2.0)), seed=7), 60)
    random.seed(2)
    assert draw(TaskStream(taskset(a=(20, 1.0), b=(5, 2.0)), seed=7), 60) == once
    assert draw(TaskStream(taskset(a=(20, 1.0), b=(5, 2.0)), seed=8), 60) != once
    assert draw(TaskStream(taskset(a=(6, 1.0)), seed=0), 6) == ["a5", "a3", "a4", "a2", "a1", "a0"], (
        "it must not change between versions"
    )


def test_without_shuffling_tasks_come_in_file_order():
    assert draw(TaskStream(taskset(a=(3, 1.0)), seed=0, shuffle=False), 7) == ["a0", "a1", "a2", "a0", "a1", "a2", "a0"]


def test_sources_are_mixed_by_weight_in_every_stretch():
    stream = TaskStream(taskset(a=(7, 3.0), b=(5, 1.0)), seed=0)
    drawn = draw(stream, 400)
    for start in range(0, 400, 40):
        assert Counter(prompt[0] for prompt in drawn[start : start + 40]) == {"a": 30, "b": 10}
    for name, size, weight in (("a", 7, 300), ("b", 5, 100)):
        mine = [prompt for prompt in drawn if prompt[0] == name]
        assert len(mine) == weight
        for start in range(0, weight - size, size):
            assert len(set(mine[start : start + size])) == size


def test_the_epoch_is_that_of_the_last_task_s_source():
    stream = TaskStream(taskset(a=(2, 1.0), b=(100, 1.0)), seed=0)
    seen = [(drawn.task.source, drawn.epoch) for drawn in stream.draw(10, 1)]
    assert [epoch for source, epoch in seen if source == "a"] == [0, 0, 1, 1, 2]
    assert {epoch for source, epoch in seen if source == "b"} == {0}


@pytest.mark.parametrize("drawn", [0, 1, 19, 20, 21, 333])
def test_a_stream_resumes_exactly_from_json(drawn):
    data = taskset(a=(13, 1.0), b=(5, 2.5))
    stream = TaskStream(data, seed=3)
    draw(stream, drawn)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = TaskStream(data, seed=99)
    resumed.load_state_dict(state)
    assert resumed.epoch == stream.epoch
    assert draw(resumed, 50) == draw(stream, 50)
    assert resumed.state_dict() == stream.state_dict()


def test_resuming_with_other_data_is_refused():
    state = TaskStream(taskset(a=(13, 1.0)), seed=3).state_dict()
    with pytest.raises(UserError, match=r"the data changed since the checkpoint \(tasks then: a 13; now: a 12\)"):
        TaskStream(taskset(a=(12, 1.0)), seed=3).load_state_dict(state)


def test_a_stream_of_nothing_is_refused():
    with pytest.raises(UserError, match="no tasks to draw"):
        TaskStream(TaskSet({}, {}))
