"""Tasks that are made or read as they are drawn, and tasks that a plugin chooses; each resumed to the task."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from itertools import count, islice

import pytest

from rlhf_host import RunError, Task, UserError, hookimpl
from rlhf_host.config.schema import DataConfig, DataSource
from rlhf_host.data.sources import load_tasks
from rlhf_host.data.stream import IndexedTasks, TaskSet, TaskStream
from rlhf_host.plugins.discovery import PluginInfo
from rlhf_host.plugins.manager import Loaded, PluginManager

PLUGIN = '''
"""Task sources that note what is asked of them."""
from collections.abc import Sequence
from itertools import count
from pydantic import BaseModel
from rlhf_host import Task, hookimpl

MADE = []

def task(number):
    MADE.append(number)
    return Task("a" * (1 + number % 7) + str(number), str(number))

class Numbers(Sequence):
    def __len__(self):
        return 1000
    def __getitem__(self, number):
        return task(number)

class Source:
    class Options(BaseModel):
        pass
    def __init__(self, options):
        self.at = 0

class Indexed(Source):
    @hookimpl
    def load_tasks(self, split, seed):
        return Numbers()

class Endless(Source):
    @hookimpl
    def load_tasks(self, split, seed):
        return map(task, count())

class Three(Source):
    @hookimpl
    def load_tasks(self, split, seed):
        yield from map(task, range(3))

class Placed(Source):
    """Keeps its own place."""
    @hookimpl
    def load_tasks(self, split, seed):
        while True:
            self.at += 1
            yield task(self.at - 1)
    @hookimpl
    def state_dict(self):
        return {"at": self.at}
    @hookimpl
    def load_state_dict(self, state):
        self.at = state["at"]
'''
NAMES = ("indexed", "endless", "three", "placed")


@pytest.fixture
def lazy(here):
    lines = "\n".join(f"{name} = lazy_tasks:{name.capitalize()}" for name in NAMES)
    here.install("lazy-tasks", {"rlhf.tasks": lines}, {"lazy_tasks.py": PLUGIN}, requires=("rlhf-host>=0.10,<0.11",))
    return importlib.import_module("lazy_tasks")


@pytest.fixture
def load(plain, lazy):
    def call(name, split="train", manager=None, first=None, **settings):
        data = DataConfig(sources=[DataSource(path=name)], **settings)
        return load_tasks(data, split=split, tokenizer=plain, seed=0, manager=manager, first=first)

    return call


@pytest.fixture
def choosing():
    """Makes the plugins of a run in which one chooses tasks."""

    class Chooser:
        @hookimpl
        def draw_tasks(self, tasks, count, step):
            return range(count)

    info = PluginInfo("extension", "own", "made-up", "1", "any", "ok", "", "m:X")
    return lambda: PluginManager([Loaded("extension", "own", info, Chooser())])


def numbers(stream, count):
    return [int(drawn.task.ground_truth) for drawn in stream.draw(count, 1)]


def test_a_sequence_is_indexed_as_tasks_are_drawn(load, lazy, plain):
    taskset = load("indexed")
    assert isinstance(taskset.sources["indexed"], IndexedTasks)
    assert lazy.MADE == []
    assert "1000 tasks" in taskset.report[0]
    stream = TaskStream(taskset, seed=3)
    drawn = numbers(stream, 5)
    assert drawn == lazy.MADE
    assert drawn != sorted(drawn), "shuffled, as a list is"
    assert numbers(TaskStream(load("indexed"), seed=3, shuffle=False), 3) == [0, 1, 2]
    (first,) = TaskStream(load("indexed"), seed=3).draw(1, 1)
    assert plain.decode(first.task.prompt_ids) == first.task.prompt
    assert (first.task.index, first.task.source) == (drawn[0], "indexed")


@pytest.mark.parametrize("name", ["endless", "placed"])
def test_an_iterator_is_read_as_tasks_are_drawn_in_its_own_order(load, lazy, name):
    stream = TaskStream(load(name), seed=3)
    assert lazy.MADE == []
    assert numbers(stream, 4) == [0, 1, 2, 3]
    assert lazy.MADE == [0, 1, 2, 3]


def test_an_iterator_that_ends_begins_again(load):
    stream = TaskStream(load("three"))
    drawn = stream.draw(7, 1)
    assert [int(one.task.ground_truth) for one in drawn] == [0, 1, 2, 0, 1, 2, 0]
    assert [one.epoch for one in drawn] == [0, 0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize("name", ["indexed", "endless", "three"])
@pytest.mark.parametrize("before", [0, 2, 3, 5])
def test_lazy_sources_resume_to_the_task(load, name, before):
    stream = TaskStream(load(name), seed=1)
    numbers(stream, before)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = TaskStream(load(name), seed=9)
    resumed.load_state_dict(state)
    expected = numbers(stream, 6)
    assert numbers(resumed, 6) == expected
    resumed.load_state_dict(state)
    assert numbers(resumed, 6) == expected, "put back, as after an interrupted step"


def test_a_source_with_a_state_of_its_own_is_not_skipped_through(load, lazy):
    manager = PluginManager([])
    stream = TaskStream(load("placed", manager=manager))
    assert numbers(stream, 3) == [0, 1, 2]
    state, place = stream.state_dict(), manager.call("tasks:placed", "state_dict")
    again = PluginManager([])
    resumed = TaskStream(load("placed", manager=again))
    resumed.load_state_dict(state)
    again.call("tasks:placed", "load_state_dict", state=place)
    lazy.MADE.clear()
    assert [(int(one.task.ground_truth), one.task.index) for one in resumed.draw(2, 1)] == [(3, 3), (4, 4)]
    assert lazy.MADE == [3, 4], "nothing was read twice"


def test_evaluation_and_bounds_read_what_they_need(load, lazy):
    assert [int(task.ground_truth) for task in load("three", split="eval").tasks] == [0, 1, 2]
    assert len(load("endless", max_samples=5).tasks) == 5
    assert lazy.MADE[3:] == [0, 1, 2, 3, 4]


def test_prompts_that_are_too_long_are_passed_over_or_cut_when_they_are_drawn(load, plain):
    kept = [number for number in range(20) if 1 + number % 7 + len(str(number)) <= 4]
    for name in ("endless", "indexed"):
        stream = TaskStream(load(name, max_prompt_tokens=4), shuffle=False)
        assert numbers(stream, len(kept)) == kept
    (cut,) = islice(TaskStream(load("endless", max_prompt_tokens=4, long_prompts="truncate")).draw(6, 1), 5, 6)
    assert plain.decode(cut.task.prompt_ids) == "aaa5"
    with pytest.raises(UserError, match="no prompt of indexed is short enough"):
        TaskStream(load("indexed", max_prompt_tokens=1)).draw(1, 1)


def test_task_plugins_take_part_in_the_run(load):
    manager = PluginManager([])
    load("three", manager=manager)
    load("three", split="eval", manager=manager)
    assert list(manager.by_key) == ["tasks:three", "eval_tasks:three"]
    assert manager.names("load_tasks") == ["tasks:three", "eval_tasks:three"]


# --- chosen by a plugin -----------------------------------------------------------------------------


def taskset(**sizes):
    sources = {name: [Task(f"{name}{i}", index=i, source=name) for i in range(size)] for name, size in sizes.items()}
    return TaskSet(sources, dict.fromkeys(sizes, 1.0))


def test_a_plugin_chooses_by_number_over_all_sources_or_gives_its_own():
    seen = []

    def choose(tasks: Sequence[Task], wanted: int, step: int):
        seen.append((len(tasks), tasks[0].prompt, tasks[4].prompt, [task.prompt for task in tasks[1:5]], wanted, step))
        return [4, 0, 0, Task("own")]

    stream = TaskStream(taskset(a=3, b=2), choose=choose)
    drawn = stream.draw(4, 9)
    assert [one.task.prompt for one in drawn] == ["b1", "a0", "a0", "own"]
    assert len({one.epoch for one in drawn}) == 4, "the same task again is another draw, with other uniforms"
    assert seen == [(5, "a0", "b1", ["a1", "a2", "b0", "b1"], 4, 9)]
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = TaskStream(taskset(a=3, b=2), choose=choose)
    resumed.load_state_dict(state)
    assert [one.epoch for one in resumed.draw(4, 10)] == [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ([0], "a plugin gave 1 tasks from draw_tasks at step 1, expected 2"),
        (count(), "a plugin gave more than 2 tasks from draw_tasks at step 1, expected 2"),
        ([0, True], "a plugin gave True from draw_tasks, expected a Task or a number below 5"),
        ([0, 5], "a plugin gave 5 from draw_tasks, expected a Task or a number below 5"),
        ([0, -1], "a plugin gave -1 from draw_tasks, expected a Task"),
        ([0, "a0"], "a plugin gave 'a0' from draw_tasks, expected a Task"),
    ],
)
def test_what_cannot_be_drawn_is_named(chosen, message):
    with pytest.raises(RunError, match=message):
        TaskStream(taskset(a=3, b=2), choose=lambda *_: chosen).draw(2, 1)


@pytest.mark.parametrize("first", [None, 8])
@pytest.mark.parametrize("name", ["endless", "three", "placed"])
def test_tasks_without_numbers_cannot_be_chosen(load, choosing, name, first):
    problem = f"extension:own chooses tasks by their numbers, and the source {name} has none: leave one of them out"
    with pytest.raises(UserError, match=f"{problem}, or give --data.{name}.max-samples"):
        load(name, manager=choosing(), first=first)


@pytest.mark.parametrize("first", [None, 8])
def test_those_that_are_counted_can_be_chosen(load, choosing, first):
    assert len(load("endless", manager=choosing(), first=first, max_samples=20)) == (first or 20)
    assert len(load("endless", split="eval", manager=choosing(), first=3)) == 3
    assert len(load("indexed", manager=choosing(), first=first)) == (first or 1000)
