"""Task plugins as sources of data."""

import sys

import pytest

from rlhf_host.config.schema import DataSource
from rlhf_host.data.stream import TaskStream
from rlhf_host.errors import UserError

GOOD = '{"prompt": "p", "label": "1"}\n'


def test_a_task_plugin_is_a_source_by_its_name(load):
    taskset = load(DataSource(path="arithmetic", count=5))
    assert len(taskset) == 5
    assert taskset.report[0].startswith("arithmetic: 5 tasks from tasks 'arithmetic' from rlhf-host ")


def test_a_local_path_wins_over_a_plugin_s_name(load, write, tmp_path, monkeypatch):
    write("arithmetic/train.jsonl", GOOD)
    monkeypatch.chdir(tmp_path)
    assert [task.prompt for task in load("arithmetic").tasks] == ["p"]


def test_a_plugin_s_options_are_checked_and_a_near_miss_of_its_name_is_said(load, write):
    with pytest.raises(UserError, match="has no option 'digit'; did you mean 'digits'"):
        load(DataSource(path="arithmetic", digit=1))
    with pytest.raises(UserError, match="is called 'arithmetics'; did you mean 'arithmetic'"):
        load("arithmetics")
    with pytest.raises(UserError, match="is not a task plugin, so it takes no options"):
        load(DataSource(path=write("a.jsonl", GOOD), digits=1))


PLUGIN = """
from rlhf_host import Task, hookimpl

class Source:
    def __init__(self, options):
        pass

    @hookimpl
    def load_tasks(self, split, seed):
        yield Task("first", metadata={"split": split, "seed": seed})
        yield {"prompt": [{"role": "user", "content": "second"}], "label": 2, "level": 3, "agent": "shell"}
        MORE
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A distribution with a task plugin ``puzzles`` whose tasks end with the given statement."""

    def install(more="return"):
        (tmp_path / "puzzles_plugin.py").write_text(PLUGIN.replace("MORE", more))
        info = tmp_path / "puzzles_plugin-2.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: puzzles-plugin\nVersion: 2.0\nRequires-Dist: rlhf-host>=0.10,<0.11\n"
        )
        (info / "entry_points.txt").write_text("[rlhf.tasks]\npuzzles = puzzles_plugin:Source\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "puzzles_plugin", raising=False)

    return install


def test_a_plugin_gives_tasks_or_mappings(load, installed):
    installed()
    first, second = load("puzzles", split="eval").tasks
    assert (first.prompt, first.metadata, first.source) == ("first", {"split": "eval", "seed": 0}, "puzzles")
    assert (second.prompt[0]["content"], second.ground_truth, second.metadata, second.agent) == (
        "second",
        2,
        {"level": 3},
        "shell",
    )
    assert (first.index, second.index) == (0, 1)
    assert len(load("puzzles-plugin:puzzles", split="eval")) == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("yield {'label': 1}", "task 3: 'prompt' is null"),
        ("yield 5", "task 3: expected a Task or a mapping, got int"),
        ("raise KeyError('lost')", "load_tasks failed: KeyError: 'lost'"),
    ],
)
def test_a_plugin_s_bad_task_names_the_plugin(load, installed, more, message):
    """Read at once, or when it is drawn."""
    installed(more)
    for read in (lambda: load("puzzles", split="eval"), lambda: TaskStream(load("puzzles")).draw(3, 1)):
        with pytest.raises(UserError) as caught:
            read()
    assert str(caught.value) == f"tasks 'puzzles' from puzzles-plugin 2.0: {message}" or str(caught.value).startswith(
        f"tasks 'puzzles' from puzzles-plugin 2.0: {message}"
    )
