"""Rows in their order, each once per pass, from any place on; what is refused; and whole runs that are resumed and killed."""

from __future__ import annotations

import bz2
import gzip
import json
import subprocess
import sys
from itertools import islice
from types import SimpleNamespace

import pytest
import rlhf_authoring.learner
from rlhf_authoring.killing import curve, killed_and_resumed, start
from rlhf_plugin_streaming import Streaming

from rlhf_host import UserError

ROWS = [{"prompt": f"{a}+{b}=", "label": str(a + b), "level": a} for a in range(10, 20) for b in range(10, 14)]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def shards(tmp_path):
    """Three shards of 40 rows, in a directory."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for number, rows in enumerate((ROWS[:13], ROWS[13:26], ROWS[26:])):
        write(folder / f"{number}.jsonl", rows)
    return folder


def source(path, **options):
    return Streaming(Streaming.Options(files=str(path), **options))


def one_pass(plugin, seed=0):
    return [task.prompt for task in plugin.load_tasks("train", seed)]


PROMPTS = [row["prompt"] for row in ROWS]


def test_each_row_comes_once_per_pass_in_another_order(shards):
    plugin = source(shards, buffer=5)
    first, second = one_pass(plugin), one_pass(plugin)
    assert sorted(first) == sorted(second) == PROMPTS
    assert len({tuple(first), tuple(second), tuple(PROMPTS), tuple(one_pass(source(shards, buffer=5), seed=1))}) == 4
    assert one_pass(source(shards, buffer=5)) == first, "an order of the seed"
    assert one_pass(source(shards, buffer=1)) == PROMPTS


def test_tasks_are_those_of_files(shards):
    [task, *_] = source(shards, buffer=1).load_tasks("train", 0)
    assert (task.prompt, task.ground_truth, dict(task.metadata)) == ("10+10=", "20", {"level": 10})


def test_columns_are_those_of_the_first_row_in_every_block(tmp_path):
    rows = [{"instruction": f"Add {number}", "input": "to 1", "output": str(number + 1)} for number in range(5)]
    found = list(source(write(tmp_path / "rows.jsonl", rows), buffer=2).load_tasks("train", 0))
    assert sorted(task.prompt for task in found) == [f"Add {number}\n\nto 1" for number in range(5)]
    assert all(task.ground_truth for task in found)


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.bz2", "csv", "parquet"])
@pytest.mark.parametrize("drawn", [0, 1, 5, 17, 39, 40, 53])
def test_it_goes_on_from_any_place(tmp_path, ending, drawn):
    path = tmp_path / f"rows.{ending}"
    text = "".join(json.dumps(row) + "\n\n" for row in ROWS).encode()
    if ending == "csv":
        path.write_text("prompt,label,level\n" + "".join(f"{row['prompt']},{row['label']},{row['level']}\n" for row in ROWS))
    elif ending == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=7)
    else:
        path.write_bytes({"jsonl": bytes, "jsonl.gz": gzip.compress, "jsonl.bz2": bz2.compress}[ending](text))

    def draws(plugin):
        while True:
            yield from plugin.load_tasks("train", 3)

    plugin, again = source(path, buffer=6), source(path, buffer=6)
    stream = draws(plugin)
    for _ in range(drawn):
        next(stream)
    again.load_state_dict(json.loads(json.dumps(plugin.state_dict())))
    other = draws(again)
    expected = [next(stream).prompt for _ in range(50)]
    assert [next(other).prompt for _ in range(50)] == expected
    assert again.state_dict() == plugin.state_dict()


def test_the_split_may_be_in_the_name(tmp_path):
    write(tmp_path / "train.jsonl", ROWS[:4])
    write(tmp_path / "eval.jsonl", ROWS[4:7])
    found = [
        [task.prompt for task in source(tmp_path / "{split}.jsonl", buffer=1).load_tasks(split, 0)]
        for split in ("train", "eval")
    ]
    assert found == [PROMPTS[:4], PROMPTS[4:7]]


def test_lines_are_not_read_again(tmp_path, monkeypatch):
    plugin = source(write(tmp_path / "rows.jsonl", ROWS), buffer=4)
    stream = plugin.load_tasks("train", 0)
    for _ in range(21):
        next(stream)
    again, parsed = source(tmp_path / "rows.jsonl", buffer=4), []
    again.load_state_dict(plugin.state_dict())
    loads = json.loads
    monkeypatch.setattr("rlhf_plugin_streaming.shards.json.loads", lambda line: parsed.append(line) or loads(line))
    next(again.load_tasks("train", 0))
    assert len(parsed) == 4, "the block alone"


def test_a_data_set_of_datasets_streams_by_its_shards(shards, monkeypatch):
    import datasets

    real, files = datasets.load_dataset, [str(path) for path in sorted(shards.iterdir())]
    asked = []

    def load(path, subset, *, split, streaming):
        asked.append((path, subset, split, streaming))
        return real("json", data_files=files, split="train", streaming=True)

    monkeypatch.setattr("datasets.load_dataset", load)
    plugin, again = source("someone/sums", buffer=4), source("someone/sums", buffer=4)
    stream = plugin.load_tasks("train", 0)
    first = [next(stream).prompt for _ in range(15)]
    again.load_state_dict(plugin.state_dict())
    rest = [task.prompt for task in again.load_tasks("train", 0)]
    assert sorted(first + rest) == PROMPTS
    assert rest == [task.prompt for task in stream]
    assert asked == [("someone/sums", None, "train", True)] * 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"prompt": "1+1=", "label": "2"}\n{"prompt": }\n', r"rows.jsonl:2: not valid JSON: Expecting value at column 12"),
        ('{"prompt": "1+1=", "label": "2"}\n\n[1]\n', r"rows.jsonl:3: a row is a JSON object, not a list"),
        ("\n" + "[" * 200_000 + "\n", r"rows.jsonl:2: JSON nested too deeply"),
        ('{"prompt": "1+1=", "label": "\xe9"}\n', r"rows.jsonl:1: not UTF-8: byte 0xe9 at byte 30 of the line"),
        ('\xef\xbb\xbf\n\xef\xbb\xbf{"prompt": "1+1="}\n', r"rows.jsonl:2: not valid JSON: Unexpected UTF-8 BOM"),
        ('{"prompt": "1+1=", "label": "2"}\n{"label": "2"}\n', r"rows.jsonl:2: no 'prompt' \(the prompt\)"),
        ('{"prompt": "1+1=", "label": "2"}\n{"prompt": "x", "label": ""}\n', r"rows.jsonl:2: 'label' is empty"),
    ],
)
def test_a_bad_row_is_told_with_its_line(tmp_path, content, said):
    path = tmp_path / "rows.jsonl"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=said):
        one_pass(source(path, buffer=1))


def test_a_row_of_a_table_is_told_with_its_line(tmp_path):
    path = tmp_path / "rows.CSV.gz"
    path.write_bytes(gzip.compress(b'prompt,label\n"1+\n1=",2\n\n,3\n'))
    with pytest.raises(UserError, match=r"rows.CSV.gz:5: 'prompt' is empty"):
        one_pass(source(path, buffer=1))


@pytest.mark.parametrize("content", ["", "\n \n", '{"prompt": ""}\n'])
def test_a_stream_without_rows_is_told_with_its_file(tmp_path, content):
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(UserError, match=r"no row of \S+rows.jsonl can be used: it has none, or only bad ones"):
        one_pass(source(tmp_path / "rows.jsonl", on_bad_row="skip"))


def test_a_pass_that_was_drawn_to_its_end_is_not_empty(shards):
    plugin, again = source(shards, buffer=5), source(shards, buffer=5)
    list(islice(plugin.load_tasks("train", 0), len(ROWS)))
    again.load_state_dict(plugin.state_dict())
    assert one_pass(again) == []
    assert sorted(one_pass(again)) == PROMPTS


@pytest.mark.parametrize("change", ["write_text", "unlink"])
def test_a_shard_that_changes_before_its_turn_is_named(shards, change):
    stream = source(shards, buffer=1).load_tasks("train", 0)
    next(stream)
    (shards / "1.jsonl").write_text("") if change == "write_text" else (shards / "1.jsonl").unlink()
    with pytest.raises(UserError, match=r"1.jsonl has changed or is gone since"):
        list(stream)


def test_files_of_a_directory_that_are_not_read_are_told_once(shards, caplog):
    for name in ("a.json", "b.txt", "c.jsonl.zst", "d.md"):
        (shards / name).write_text("x")
    plugin = source(shards)
    with caplog.at_level("INFO"):
        one_pass(plugin), one_pass(plugin)
    assert caplog.messages == ["streaming: not read, because of their kind: a.json, b.txt, c.jsonl.zst and 1 more"]


def test_bad_rows_can_be_left_out_and_are_told(tmp_path, caplog):
    path = write(tmp_path / "rows.jsonl", [*ROWS[:3], {"prompt": "", "label": "1"}, *ROWS[3:6]])
    assert sorted(one_pass(source(path, buffer=5, on_bad_row="skip"))) == PROMPTS[:6]
    assert "left out 1 bad row, the first at" in caplog.text
    assert "rows.jsonl:4: 'prompt' is empty" in caplog.text


@pytest.mark.parametrize(
    ("path", "options", "said"),
    [
        ("empty", {}, "there is no file of .jsonl"),
        ("*.json", {}, "there is no file of .jsonl"),
        ("notes.txt", {}, "notes.txt cannot be read in parts"),
        ("rows.jsonl", {"hub_config": "a"}, "hub_config is for hub data sets"),
        ("row.jsonl", {}, "row.jsonl: no such file or directory"),
        ("e*.jsonl", {}, "e.jsonl is a directory"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, path, options, said):
    (tmp_path / "empty").mkdir()
    (tmp_path / "e.jsonl").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(UserError, match=said):
        source(tmp_path / path, **options).load_tasks("train", 0)


def hears(path, data, *others, split="train", **options):
    """The start of a run with these settings of ``data``, where the plugin has its options beside its path."""
    plugin = source(path, **options)
    plugin.load_tasks(split, 0)
    own = {"path": "streaming", "files": str(path), **options}
    section = {"shuffle": True, **data, "sources": [own, *({"path": other} for other in others)]}
    config = {"data": section, "eval": {"data": {}}} if split == "train" else {"data": {}, "eval": {"data": section}}
    plugin.run_started(SimpleNamespace(config=config))


OWN = {"ignore": ["video"], "on_bad_row": "skip", "fetch_images": True, "prompt": "question", "label": "level", "agent": "who"}


def test_options_of_rows_are_taken(shards):
    hears(shards, {"on_bad_row": "stop"}, **OWN)
    hears(shards, {"prompt_key": None}, split="eval", **OWN)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_settings_of_the_section_are_for_other_sources(shards, split):
    where = "data" if split == "train" else "eval.data"
    with pytest.raises(UserError, match=f"^{where}.on_bad_row does not reach streaming: give --{where}.streaming.on-bad-row"):
        hears(shards, {"on_bad_row": "skip"}, "other.jsonl", split=split)
    with pytest.raises(UserError, match=f"^{where}.on_bad_row does not reach streaming"):
        hears(shards, {"on_bad_row": "skip"}, split=split, on_bad_row="skip")
    hears(shards, {"on_bad_row": "skip"}, "other.jsonl", split=split, on_bad_row="skip")


def test_a_state_of_other_files_is_refused_when_they_were_read_before(shards):
    plugin, again = source(shards), source(shards)
    plugin.load_tasks("train", 0)
    write(shards / "3.jsonl", ROWS)
    list(islice(again.load_tasks("train", 0), 6))
    with pytest.raises(UserError, match="are not those of the checkpoint"):
        again.load_state_dict(plugin.state_dict())


# --- runs -----------------------------------------------------------------------------------------


def prompts(run):
    lines = (line for path in sorted((run / "trajectories").rglob("*.jsonl")) for line in path.read_text().splitlines())
    return [(row["step"], row["task"], row["prompt"]) for row in map(json.loads, lines) if "prompt" in row]


def flags_of(path, *more):
    learner = rlhf_authoring.learner.__file__
    flags = ["--algo", f"{learner}:Learner", "--reward", f"{learner}:right_answer", "--model", "quickstart", "--n", "2"]
    flags += ["--data", "streaming", "--data.streaming.files", path, "--data.streaming.buffer", "5", "--batch-size", "6"]
    flags += ["--max-new-tokens", "4", "--train.threads", "1", "--lr", "1e-3", "--checkpoint.every", "2", *more]
    return flags


def told(*flags):
    """A run that ends, with what it printed."""
    return subprocess.run(
        [sys.executable, "-m", "rlhf_host.cli.main", "train", *map(str, flags)], capture_output=True, text=True
    )


def test_a_killed_run_sees_the_rows_of_one_that_was_not(tmp_path, shards):
    flags = flags_of(shards, "--steps", 12, "--trajectories.every", 1)
    assert start(*flags, "--run-dir", tmp_path / "whole").wait() == 0
    killed_and_resumed(flags, tmp_path / "run", rows=4, steps=12)
    seen = prompts(tmp_path / "whole")
    assert prompts(tmp_path / "run") == seen
    first_pass = [prompt for _, _, prompt in seen[::2]][: len(ROWS)]
    assert sorted(first_pass) == sorted(PROMPTS), "none is skipped, none comes twice"
    for name in ("loss", "grad_norm", "reward/mean", "epoch"):
        assert [row[name] for row in curve(tmp_path / "run")] == [row[name] for row in curve(tmp_path / "whole")], name


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--async-depth", "1"), "a task source has a state of its own: leave --async-depth out"),
        (("--data.label-key", "level"), "data.label_key does not reach streaming: give --data.streaming.label instead"),
        (("--data.streaming.label-key", "level"), "data.label_key does not reach streaming"),
        (("--data.shuffle", "false"), "data.shuffle is false, and streaming shuffles"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(tmp_path, shards, flags, said):
    done = told(*flags_of(shards, "--steps", "2", "--run-dir", tmp_path / "run", *flags))
    assert done.returncode == 2, done.stderr
    assert said in " ".join(done.stderr.split())


def test_a_run_leaves_bad_rows_out(tmp_path):
    path = write(tmp_path / "rows.jsonl", [*ROWS[:3], {"prompt": "", "label": "1"}, *ROWS[3:6]])
    done = told(*flags_of(path, "--steps", "2", "--run-dir", tmp_path / "run", "--data.streaming.on-bad-row", "skip"))
    assert done.returncode == 0, done.stderr
    assert "rows.jsonl:4: 'prompt' is empty" in done.stderr


def test_other_data_than_the_checkpoint_s_is_refused(tmp_path, shards):
    assert start(*flags_of(shards, "--steps", "2", "--run-dir", tmp_path / "run")).wait() == 0
    write(shards / "3.jsonl", ROWS)
    done = told("--resume", tmp_path / "run", "--train.steps", "4")
    assert done.returncode == 2, done.stderr
    assert "are not those of the checkpoint: resume with the same data" in " ".join(done.stderr.split())
