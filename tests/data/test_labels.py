"""Labels are looked at before anything is sampled, by those who read them."""

import datetime
import json
import re
from decimal import Decimal

import datasets
import pytest

from rlhf_host.config.schema import DataConfig
from rlhf_host.data.sources import load_tasks
from rlhf_host.errors import UserError
from rlhf_host.hookspecs import hookimpl
from rlhf_host.plugins.manager import Loaded, PluginManager
from rlhf_host.plugins.python_objects import describe
from rlhf_host.plugins.reward_functions import FunctionReward

from .conftest import byte_tokenizer


def by_text(text, label):
    return text == label


def by_text_alone(text, label=None):
    return 1.0


def of_trl(completions, answer, **columns):
    return [1.0 for _ in completions]


def of_trl_with_tests(completions, tests):
    return [1.0 for _ in completions]


class Integers:
    @hookimpl
    def check_labels(self, tasks):
        return {place: "its label is no integer" for place, task in enumerate(tasks) if not isinstance(task.ground_truth, int)}


def load(rows, *rewards, split="train", **settings):
    """``rewards``: kind, alias, plugin and weight of each."""
    info = describe("reward", "mine", by_text)
    manager = PluginManager([Loaded(kind, alias, info, plugin, weight) for kind, alias, plugin, weight in rewards])
    path, given = (rows, {}) if isinstance(rows, str) else ("python:data", {"python:data": rows})
    data = DataConfig(sources=[{"path": path}], **settings)
    return load_tasks(data, split=split, tokenizer=byte_tokenizer(), seed=0, rows=given, manager=manager)


def reward(function, alias="mine", kind="reward", weight=1.0):
    plugin = function if hasattr(function, "check_labels") else FunctionReward(function, alias)
    return kind, alias, plugin, weight


QUESTION = {"question": "2+2", "result": "4", "level": 1}


@pytest.mark.parametrize("function", [by_text, of_trl, Integers()], ids=["function", "of TRL", "plugin"])
def test_a_missing_label_is_an_error_that_names_the_columns_and_the_setting(write, function):
    path = write("a.jsonl", json.dumps(QUESTION) + "\n")
    with pytest.raises(UserError) as caught:
        load(path, reward(function))
    assert str(caught.value).startswith(f"{path}:1: reward:mine cannot judge the row: ")
    columns = "; its columns are question, result, level: name the one with the label, --data.label-key NAME"
    assert str(caught.value).endswith(columns)
    with pytest.raises(UserError, match=r"--data\.label-key NAME$"):
        load(path, reward(function), on_bad_row="skip")
    assert load(path).tasks[0].ground_truth is None
    assert load([{**QUESTION, "answer": 4}], reward(function))


def test_who_reads_no_label_or_does_not_count_is_not_asked():
    assert load([QUESTION], reward(by_text_alone))
    assert load([QUESTION], reward(by_text, weight=0.0))
    with pytest.raises(UserError, match="reward:mine cannot"):
        load([QUESTION], reward(by_text), split="eval")
    own = [reward(by_text), reward(by_text_alone, "held_out", "eval_reward")]
    assert load([QUESTION], *own, split="eval")
    with pytest.raises(UserError, match="reward:mine cannot judge"):
        load([QUESTION], *own)


def test_a_column_that_a_function_takes_is_missed_before_the_first_rollout():
    with pytest.raises(UserError, match=r"data\[0\]: reward:mine .* takes 'tests', and the row has no such column"):
        load([QUESTION], reward(of_trl_with_tests))
    assert load([{**QUESTION, "tests": ["assert True"]}], reward(of_trl_with_tests))


def test_a_number_that_is_missing_in_a_table_is_no_label():
    rows = [{"prompt": "1+1", "label": 2.0}, {"prompt": "2+2", "label": float("nan")}]
    with pytest.raises(UserError, match=r"'label' is empty; every row needs a label"):
        load(rows, on_bad_row="stop")


def test_labels_that_cannot_be_used_are_bad_rows():
    rows = [{"prompt": "1", "label": 1}, {"prompt": "2", "label": "two"}, {"prompt": "3", "label": 3}]
    with pytest.raises(
        UserError, match=r"data\[1\]: reward:mine cannot judge the row: its label is no integer \(data.on_bad_row"
    ):
        load(rows, reward(Integers()))
    taskset = load(rows, reward(Integers()), on_bad_row="skip")
    assert [task.ground_truth for task in taskset.tasks] == [1, 3]
    assert "left out 1 bad row, the first at data[1]" in taskset.report[0]


def test_tasks_of_a_plugin_are_bad_rows_too(tmp_path):
    (tmp_path / "three.py").write_text(
        "from rlhf_host import hookimpl\n\n\nclass Three:\n    @hookimpl\n    def load_tasks(self, split, seed):\n"
        "        return [{'prompt': str(n), 'label': label} for n, label in enumerate((1, 'two', 3))]\n"
    )
    path = f"{tmp_path}/three.py:Three"
    said = r"task 2: reward:mine cannot judge the row: its label is no integer \(data.on_bad_row skip leaves such rows out\)"
    with pytest.raises(UserError, match=said):
        load(path, reward(Integers()))
    taskset = load(path, reward(Integers()), on_bad_row="skip")
    assert [task.ground_truth for task in taskset.tasks] == [1, 3]
    assert re.search(r"2 tasks from .*; left out 1 bad row, the first at .*task 2: reward:mine cannot", taskset.report[0])


def test_decimals_dates_and_numbers_of_tables_are_labels(tmp_path):
    values = {"answer": [Decimal("1.50"), Decimal("3.00")], "when": [datetime.date(2024, 1, 2), datetime.date(2024, 3, 4)]}
    datasets.Dataset.from_dict({"prompt": ["a", "b"], **values}).to_parquet(tmp_path / "a.parquet")
    for key, expected in (("answer", [1.5, 3]), ("when", ["2024-01-02", "2024-03-04"])):
        tasks = load(str(tmp_path / "a.parquet"), label_key=key).tasks
        assert [task.ground_truth for task in tasks] == expected
        json.dumps([dict(task.metadata) for task in tasks])
    frame = datasets.load_dataset("parquet", data_files=str(tmp_path / "a.parquet"), cache_dir=str(tmp_path))[
        "train"
    ].to_pandas()
    tasks = load(frame.to_dict("records"), label_key="answer").tasks
    assert [task.ground_truth for task in tasks] == [1.5, 3]


CHOICES = ["three", "four"]


@pytest.mark.parametrize(
    "row",
    [
        {"question": "2+2", "choices": CHOICES, "answer": 1},
        {"question": "2+2", "options": json.dumps(CHOICES), "answer": "B"},
        {"question": "2+2", "choices": {"text": CHOICES, "label": ["A", "B"]}, "answer": "B"},
        {"question": "2+2", "endings": {"A": "three", "B": "four"}, "answer": "1"},
    ],
)
def test_choices_that_a_label_indexes_are_not_left_unread_in_silence(row):
    (column,) = row.keys() - {"question", "answer"}
    with pytest.raises(UserError, match=f"'answer' chooses from '{column}', and nothing reads that: write the choices"):
        load([row])
    assert load([row], ignore=[column]).tasks[0].metadata[column] == row[column]
    written = {**row, "question": "2+2: (A) three (B) four"}
    assert load([written]).tasks[0].ground_truth == row["answer"]
    assert load([{**row, "answer": "four"}]).tasks[0].ground_truth == "four", "a label with the text of a choice indexes none"
    assert load([{**row, "answer": 7}]).tasks[0].ground_truth == 7
