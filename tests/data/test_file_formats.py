"""Files of every format become the same tasks, and files without rows none."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from rlhf_host.config.schema import DataSource
from rlhf_host.errors import UserError

from .conftest import lines

REPOSITORY = Path(__file__).parents[2]
SHARED = REPOSITORY.parent / "shared" / "data"
ROWS = [{"prompt": "1+1=", "label": "2", "level": 1}, {"prompt": "2+2=", "label": "4", "level": 2}]


@pytest.fixture(
    params=[
        "jsonl",
        "jsonl.gz",
        "ndjson",
        "json",
        "one-per-line.json",
        "csv",
        "tsv",
        "csv.gz",
        "parquet",
        "directory",
        "saved",
        "saved-splits",
    ]
)
def stored(request, tmp_path, write):
    """The two rows in each format."""
    kind, path = request.param, tmp_path / f"data.{request.param}"
    table = "prompt,label,level\n1+1=,2,1\n2+2=,4,2\n"
    if kind in ("jsonl", "ndjson", "one-per-line.json"):
        return write(path.name, lines(ROWS))
    if kind == "jsonl.gz":
        return write(path.name, gzip.compress(lines(ROWS).encode()))
    if kind == "json":
        return write(path.name, json.dumps(ROWS, indent=2))
    if kind in ("csv", "tsv"):
        return write(path.name, table if kind == "csv" else table.replace(",", "\t"))
    if kind == "csv.gz":
        return write(path.name, gzip.compress(table.encode()))
    rows = datasets.Dataset.from_list(ROWS)
    if kind == "parquet":
        rows.to_parquet(path)
    elif kind == "directory":
        write("data.directory/data/train-00000.parquet", b"")
        rows.select([0]).to_parquet(path / "data" / "train-00000.parquet")
        rows.select([1]).to_parquet(path / "data" / "train-00001.parquet")
    elif kind == "saved":
        rows.save_to_disk(path)
    else:
        datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(path)
    return str(path)


def test_every_format_gives_the_same_tasks(load, stored, plain):
    tasks = load(stored).tasks
    assert [(task.prompt, task.ground_truth, task.index) for task in tasks] == [("1+1=", "2", 0), ("2+2=", "4", 1)]
    assert [str(task.metadata["level"]) for task in tasks] == ["1", "2"]
    assert [plain.decode(task.prompt_ids) for task in tasks] == ["1+1=", "2+2="]


def test_the_sample_that_ships_with_the_project_loads_with_gsm8k_answers_as_labels(load):
    taskset = load(REPOSITORY / "examples/data/gsm8k_sample.jsonl")
    assert len(taskset) == 200
    assert all("\n#### " in task.ground_truth for task in taskset.tasks)
    assert taskset.report[0].startswith("gsm8k_sample: 200 tasks from ")
    assert "(prompt 'question', label 'answer')" in taskset.report[0]


def test_the_whole_of_gsm8k_loads(load):
    path = SHARED / "gsm8k_train.jsonl"
    if not path.exists():
        pytest.skip(f"needs {path}")
    assert len(load(path)) == 7473


def test_json_values_arrive_exactly_as_written(load, write):
    """A columnar reader would make a timestamp of the date and floats of the others, and refuse the mixture."""
    values = ["2024-02-29 10:00:00", 12345678901234567890123, 0.1, [1, "x"], {"a": None}, "085"]
    path = write("a.jsonl", lines({"prompt": "p", "label": value} for value in values))
    assert [task.ground_truth for task in load(path).tasks] == values


def test_csv_values_stay_text_and_quoted_fields_may_hold_newlines(load, write):
    path = write("a.csv", '\ufeffquestion,answer\r\n"two\nlines",085\r\nNA,1.50\r\n')
    assert [(task.prompt, task.ground_truth) for task in load(path).tasks] == [("two\nlines", "085"), ("NA", "1.50")]


def test_blank_lines_a_byte_order_mark_and_windows_line_ends_are_fine(load, write):
    path = write("a.jsonl", "\ufeff" + lines(ROWS).replace("\n", "\r\n\r\n"))
    assert len(load(path)) == 2


def test_a_directory_of_json_lines_reads_the_split_that_is_asked_for(load, write, tmp_path):
    write("d/train.jsonl", lines(ROWS))
    write("d/test.jsonl", lines(ROWS[:1]))
    write("d/extra.jsonl", "")
    assert len(load(tmp_path / "d")) == 2
    assert len(load(tmp_path / "d", split="eval")) == 1
    assert len(load(DataSource(path=str(tmp_path / "d"), split="test"))) == 1
    with pytest.raises(UserError, match="has no split 'tset'; did you mean 'test'"):
        load(DataSource(path=str(tmp_path / "d"), split="tset"))


def test_of_several_subsets_the_main_one_is_read_and_said(load, write, tmp_path):
    """As ``openai/gsm8k`` is laid out: subsets main and socratic, none marked as the default."""
    configs = "".join(
        f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}.jsonl\n" for name in ("main", "socratic")
    )
    write("d/README.md", f"---\nconfigs:\n{configs}---\n")
    write("d/main.jsonl", lines(ROWS))
    write("d/socratic.jsonl", lines(ROWS[:1]))
    taskset = load(tmp_path / "d")
    assert len(taskset) == 2
    assert "subset 'main' of main, socratic" in taskset.report[0]
    assert len(load(DataSource(path=str(tmp_path / "d"), subset="socratic"))) == 1
    with pytest.raises(UserError, match="has no subset 'socrates'; did you mean 'socratic'"):
        load(DataSource(path=str(tmp_path / "d"), subset="socrates"))


def test_reading_files_leaves_nothing_in_the_cache_of_datasets(write, tmp_path):
    path = write("a.jsonl", lines(ROWS))
    program = (
        "from rlhf_host.config.schema import DataConfig, DataSource\n"
        "from rlhf_host.data.arithmetic import character_tokenizer\n"
        "from rlhf_host.data.sources import load_tasks\n"
        f"load_tasks(DataConfig(sources=[DataSource(path={path!r})]), split='train', tokenizer=character_tokenizer(), seed=0)"
    )
    home = tmp_path / "home"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=REPOSITORY, env={"HF_HOME": str(home), "PATH": ""})
    assert not [each for each in home.rglob("*") if each.is_file()]


EMPTY = {
    "parquet": lambda rows, path: rows.to_parquet(path),
    "jsonl": lambda rows, path: path.write_text(lines(rows)),
    "json": lambda rows, path: path.write_text(json.dumps(list(rows)) if len(rows) else ""),
    "csv": lambda rows, path: rows.to_csv(path, index=False),
    "arrow": lambda rows, path: write_arrow(rows.flatten_indices().data.table, path),
}


def write_arrow(table, path):
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


@pytest.mark.parametrize("kind", EMPTY)
def test_an_empty_shard_has_no_rows_and_stops_nothing(load, tmp_path, kind):
    rows = datasets.Dataset.from_list(ROWS)
    folder = tmp_path / "d"
    folder.mkdir()
    for number, part in enumerate((rows.select([]), rows, rows.select([]))):
        EMPTY[kind](part, folder / f"train-{number}.{kind}")
    assert [task.prompt for task in load(folder).tasks] == ["1+1=", "2+2="]
    assert load(folder / f"train-1.{kind}").tasks
    with pytest.raises(UserError, match="has no rows"):
        load(folder / f"train-0.{kind}")


def test_an_empty_group_of_rows_and_an_empty_saved_data_set_have_no_rows(load, tmp_path):
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.parquet.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        writer.write_table(table.slice(0, 0))
        writer.write_table(table)
    assert len(load(tmp_path / "a.parquet")) == 2
    datasets.Dataset.from_list(ROWS).select([]).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match="has no rows"):
        load(tmp_path / "saved")


def test_files_of_another_format_in_a_directory_are_named(load, write, tmp_path):
    write("d/train-0.csv", "prompt,label\n1,2\n")
    write("d/train-1.jsonl", lines(ROWS))
    report = load(tmp_path / "d").report[0]
    assert "not read, because the format differs: train-" in report
