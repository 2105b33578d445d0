"""Data settings become tasks: every kind of malformed row, every way to ask for too much."""

import gzip
import os
from pathlib import Path

import datasets
import pytest
from tokenizers import normalizers

from rlhf_host.config.schema import DataConfig, DataSource, RoleConfig
from rlhf_host.data.sources import load_tasks
from rlhf_host.errors import UserError
from rlhf_host.models.loading import load_tokenizer

from .conftest import byte_tokenizer, lines

REPOSITORY = Path(__file__).parents[2]
SHARED = REPOSITORY.parent / "shared" / "data"
ROWS = [{"prompt": "1+1=", "label": "2", "level": 1}, {"prompt": "2+2=", "label": "4", "level": 2}]


# --- malformed rows -----------------------------------------------------------------------------

GOOD = '{"prompt": "p", "label": "1"}\n'


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"prompt": "p", "label": 1', "not valid JSON: Expecting ',' delimiter at column 27"),
        ('["p", 1]', r"expected an object {...}, got a list"),
        ('{"promt": "p", "label": "1"}', "no 'prompt' (the prompt); did you mean 'promt'?"),
        ('{"prompt": "p", "lable": "1"}', "no 'label' (the label); did you mean 'lable'?"),
        ("{}", "no 'prompt' (the prompt); the row is empty"),
        ('{"prompt": null, "label": "1"}', "'prompt' is null"),
        ('{"prompt": " ", "label": "1"}', "'prompt' is empty"),
        ('{"prompt": 3, "label": "1"}', "'prompt' must be a text or a list of messages, not a number"),
        ('{"prompt": [], "label": "1"}', "'prompt' has no messages"),
        ('{"prompt": ["hi"], "label": "1"}', "message 1 must be"),
        (
            '{"prompt": [{"role": "user", "content": null}], "label": "1"}',
            "'prompt': message 1 (user) must have a text as content, not null",
        ),
        ('{"prompt": [{"role": "assistant", "content": "x"}], "label": "1"}', "ends with an assistant's message"),
        ('{"prompt": "p", "label": null}', "'label' is empty"),
        ('{"prompt": "p", "label": ""}', "'label' is empty"),
        ('{"prompt": "\\ud800", "label": "1"}', "'prompt' has half a character, '\\ud800': no tokenizer can read it"),
        ('{"prompt": [{"role": "user", "content": "\\udfff"}], "label": "1"}', "'prompt' has half a character"),
        ('{"prompt": "' + "p" * 1_000_001 + '", "label": "1"}', "'prompt' has 1,000,001 characters, more than 1,000,000"),
        ('{"prompt": "p", "label": ' + "9" * 5000 + "}", "not valid JSON: Exceeds the limit (4300 digits)"),
        ('{"prompt": "p", "label": ' + "[" * 100_000 + "}", "JSON nested too deeply"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(load, write, bad, message):
    path = write("a.jsonl", GOOD + "\n" + GOOD + bad + "\n" + GOOD)
    with pytest.raises(UserError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:4: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_malformed_row_is_named_in_every_format_that_has_lines(load, write, tmp_path):
    cases = {
        write("a.jsonl.gz", gzip.compress((GOOD + "{").encode())): 2,
        write("a.json", '[\n {"prompt": "p", "label": "1"},\n\n {"prompt": null,\n  "label": "1"}\n]'): 4,
        write("b.json", '[\n {"prompt": "p", "label": "1"}\n {"prompt": "p"}]'): 3,
        write("c.json", GOOD + "{"): 2,
        write("e.json", '[\n {"prompt": "p", "label": "1"},\n {"label": ' + "9" * 5000 + "}]"): 3,
        write("f.json", '[\n {"prompt": "p", "label": "1"},\n ' + "[" * 100_000 + "]"): 3,
        write("a.csv", 'prompt,label\n"two\nlines",1\n\np,1\n,2\n'): 6,
        write("b.csv", 'prompt,label\n"two\nlines",1\np,1,2\n'): 4,
        write("d/train.jsonl", GOOD + GOOD + "{}\n"): 3,
    }
    for path, line in cases.items():
        with pytest.raises(UserError, match=rf"{path}:{line}: "):
            load(path)
    with pytest.raises(UserError, match=rf"{tmp_path}/d/train.jsonl:3: "):
        load(tmp_path / "d")


def test_bad_rows_may_be_left_out_and_are_counted(load, write):
    bad = ["{}", '{"prompt": "p", "label": ""}', '{"prompt": "\\ud800", "label": "1"}']
    path = write("a.jsonl", "\n".join([bad[0], GOOD.strip(), *bad, GOOD]))
    taskset = load(path, on_bad_row="skip", max_samples=2)
    assert [task.index for task in taskset.tasks] == [1, 5]
    (line,) = taskset.report
    assert f"left out 4 bad rows, the first at {path}:1: no column for the prompt" in line
    with pytest.raises(UserError, match=r":1: .* \(data\.on_bad_row skip leaves such rows out\)$"):
        load(path)


def test_a_first_row_without_a_label_does_not_drop_the_labels_of_the_others(load, write):
    path = write("late.jsonl", '{"prompt": "1+2="}\n' + GOOD * 2)
    with pytest.raises(UserError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:1: no 'label' (the label), which {path}:2 has")
    taskset = load(path, on_bad_row="skip")
    assert [task.ground_truth for task in taskset.tasks] == ["1", "1"]
    assert f"label 'label'); left out 1 bad row, the first at {path}:1" in taskset.report[0]


def test_a_pipe_is_no_data(load, tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match="is a pipe or a device"):
        load(tmp_path / "pipe.jsonl")


def test_a_prompt_without_any_token_is_named(load, write, plain):
    path = write("a.jsonl", lines([{"prompt": "p"}, {"prompt": "\u200b"}]))
    plain.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")
    with pytest.raises(UserError, match=r"a\.jsonl:2: the tokenizer has no token for its prompt"):
        load(path)


# --- formats of other projects ------------------------------------------------------------------


def test_alpaca_rows_are_instruction_and_input(load, write):
    rows = [{"instruction": "Add.", "input": "1 and 1", "output": "2"}, {"instruction": "Say 3.", "input": "", "output": "3"}]
    taskset = load(write("a.jsonl", lines(rows)))
    assert [(task.prompt, task.ground_truth) for task in taskset.tasks] == [("Add.\n\n1 and 1", "2"), ("Say 3.", "3")]


def test_an_input_that_the_first_row_does_not_have_is_in_the_prompts_of_the_others(load, write):
    rows = [{"instruction": "Say hi.", "output": "hi"}, {"instruction": "Add.", "input": "1 2", "output": "3"}]
    assert [task.prompt for task in load(write("a.jsonl", lines(rows))).tasks] == ["Say hi.", "Add.\n\n1 2"]


def test_verl_rows_have_their_label_inside_a_column(load, write, chatml, tmp_path):
    prompt = [{"role": "user", "content": "1+1="}]
    row = {
        "data_source": "sums",
        "prompt": prompt,
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"i": 3},
    }
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "a.parquet")
    for path, keys in (
        (write("a.jsonl", lines([row])), {}),
        (tmp_path / "a.parquet", {}),
        (write("b.jsonl", lines([row])), {"label_key": "extra_info.i"}),
    ):
        (task,) = load(path, tokenizer=chatml, **keys).tasks
        assert task.ground_truth == (3 if keys else "2")
    with pytest.raises(UserError, match=r"no 'extra_info\.j' \(the label\)"):
        load(write("c.jsonl", lines([row])), tokenizer=chatml, label_key="extra_info.j")


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, "with chosen and rejected this is preference data"),
        ({"chosen": [{"role": "user", "content": "p"}], "rejected": []}, "with chosen and rejected this is preference data"),
        ({"prompt": "p", "completion": "c", "label": True}, "with completion and label this is unpaired data"),
        ({"prompt": "p", "completions": ["c"], "labels": [True]}, "with completions and labels this is stepwise data"),
        ({"prompt": "p", "completion": "c"}, "with completion this is prompt-completion data"),
    ],
)
def test_data_with_answers_is_refused_unless_its_prompts_are_asked_for(load, write, row, kind):
    path = write("a.jsonl", lines([row]))
    with pytest.raises(
        UserError, match=rf"a\.jsonl:1: {kind}, which algorithms that sample do not train on; .* set data\.prompt_key"
    ):
        load(path, on_bad_row="skip")
    if "prompt" in row:
        assert load(path, prompt_key="prompt").tasks[0].prompt == "p"


def test_a_completion_beside_a_label_may_be_a_reference(load, write):
    assert load(write("a.jsonl", '{"prompt": "p", "completion": "c", "answer": "1"}\n')).tasks[0].ground_truth == "1"


def test_parquet_has_rows_instead_of_lines(load, tmp_path):
    datasets.Dataset.from_list([*ROWS, {"prompt": None, "label": "1", "level": 0}]).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet, row 3: 'prompt' is null"):
        load(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.csv.gz", "a.json"])
def test_text_that_is_not_utf8_is_named_by_line(load, write, name):
    head = b"prompt,label\n" if "csv" in name else GOOD.encode()
    content = head + "{é}\n".encode("latin-1")
    path = write(name, gzip.compress(content) if name.endswith("gz") else content)
    with pytest.raises(UserError, match=rf"{path}:2: not UTF-8: byte 0xe9 at byte 2 of the line"):
        load(path)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet"])
def test_a_damaged_file_is_named(load, write, name):
    path = write(name, gzip.compress(GOOD.encode() * 1000)[:-20])
    with pytest.raises(UserError, match=rf"{path}: cannot be read: "):
        load(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_an_empty_file_has_no_rows(load, write, name):
    path = write(name, "[]" if name == "a.json" else "")
    with pytest.raises(UserError, match="has no rows"):
        load(path)


def test_columns_are_asked_for_with_a_near_match(load, write):
    path = write("a.jsonl", '{"query": "p", "reply": "1"}\n')
    with pytest.raises(
        UserError,
        match=r"a\.jsonl:1: no column for the prompt: none of prompt, question, .* is among query, reply; set data\.prompt_key",
    ):
        load(path)
    with pytest.raises(UserError, match=r"a\.jsonl:1: no 'qury' \(the prompt\); did you mean 'query'"):
        load(path, prompt_key="qury")
    assert load(path, prompt_key="query", label_key="reply").tasks[0].ground_truth == "1"


def test_rows_without_a_label_column_have_none(load, write):
    taskset = load(write("a.jsonl", '{"prompt": "p"}\n'))
    assert taskset.tasks[0].ground_truth is None
    assert "no label" in taskset.report[0]


def test_an_agent_column_names_each_row_s_agent(load, write):
    path = write("a.jsonl", '{"prompt": "p", "who": "shell"}\n{"prompt": "p", "who": null}\n')
    assert [task.agent for task in load(path, agent_key="who").tasks] == ["shell", None]


# --- what is not there --------------------------------------------------------------------------


def test_a_missing_file_gets_its_near_match(load, write):
    path = write("tasks.jsonl", GOOD)
    with pytest.raises(UserError, match=r"task\.jsonl: no such file or directory; did you mean 'tasks\.jsonl'"):
        load(path.replace("tasks", "task"))


def test_a_file_of_unknown_format_is_refused_with_the_known_ones(load, write):
    with pytest.raises(UserError, match=r"a\.xml: cannot tell its format from its name; known are \.jsonl"):
        load(write("a.xml", "<a/>"))


def test_a_directory_without_data_is_refused(load, tmp_path):
    with pytest.raises(UserError, match="cannot be read as a dataset directory"):
        load(tmp_path)


def test_a_hub_name_that_cannot_be_reached_says_what_to_do(load, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError,
        match=r"cannot load 'some-org/no-such-data': .* as a hub dataset it failed with .*check the name and the network",
    ):
        load("some-org/no-such-data")


def test_no_source_at_all_is_an_error(load):
    with pytest.raises(UserError, match="no data: give --data"):
        load()


# --- how many and how long ----------------------------------------------------------------------


def numbered(count):
    return lines({"prompt": f"{i}=", "label": str(i)} for i in range(count))


def test_max_samples_takes_the_first_rows_and_reads_no_further(load, write):
    path = write("a.jsonl", numbered(5) + "not json\n")
    assert [task.index for task in load(DataSource(path=path, max_samples=3)).tasks] == [0, 1, 2]
    assert [task.index for task in load(path, max_samples=5).tasks] == [0, 1, 2, 3, 4]


def test_max_samples_of_the_section_is_shared_by_weight(load, write):
    big, small = DataSource(path=write("a.jsonl", numbered(50)), weight=3), DataSource(path=write("b.jsonl", numbered(50)))
    taskset = load(big, small, max_samples=8)
    assert [sum(task.source == name for task in taskset.tasks) for name in ("a", "b")] == [6, 2]
    tiny = DataSource(path=write("c.jsonl", numbered(2)), weight=100)
    assert [task.source for task in load(small, tiny, max_samples=5).tasks] == ["b"] * 3 + ["c"] * 2


def test_sources_are_called_by_the_last_part_of_their_path_and_never_alike(load, write):
    paths = [write(f"{folder}/train.jsonl.gz", gzip.compress(GOOD.encode())) for folder in "xy"]
    assert load(*paths).weights == {"train": 1.0, "train-2": 1.0}
    named = [DataSource(path=path, name="same") for path in paths]
    with pytest.raises(UserError, match="same name"):
        load(*named)


def test_long_prompts_are_left_out_and_counted(load, write):
    path = write("a.jsonl", lines({"prompt": "p" * n, "label": "1"} for n in (3, 9, 4, 8)))
    taskset = load(path, max_prompt_tokens=4)
    assert [task.index for task in taskset.tasks] == [0, 2]
    assert taskset.report[1] == "a: left out 2 of 4 tasks: prompt longer than 4 tokens"


def test_long_prompts_are_cut_at_the_beginning_and_counted(load, write, make_tokenizer):
    tokenizer = make_tokenizer(bos=True)
    taskset = load(
        write("a.jsonl", '{"prompt": "abcdef"}\n{"prompt": "ab"}\n'),
        tokenizer=tokenizer,
        max_prompt_tokens=4,
        long_prompts="truncate",
    )
    assert [tokenizer.decode(task.prompt_ids) for task in taskset.tasks] == ["<s>def", "<s>ab"]
    assert taskset.report[1] == "a: cut the beginning of 1 of 2 prompts longer than 4 tokens"


def test_the_smaller_of_the_data_s_and_the_model_s_limit_holds(load, write):
    path = write("a.jsonl", lines({"prompt": "p" * n, "label": "1"} for n in (2, 4, 6)))
    assert (
        len(load(path, max_prompt_tokens=6, limit=4))
        == len(load(path, max_prompt_tokens=4, limit=6))
        == len(load(path, limit=4))
        == 2
    )


def test_no_task_left_is_an_error_and_an_emptied_source_is_said(load, write):
    long, short = write("long.jsonl", '{"prompt": "ppppp"}\n'), write("short.jsonl", '{"prompt": "p"}\n')
    taskset = load(long, short, max_prompt_tokens=2)
    assert taskset.weights == {"short": 1.0}
    assert "long: no tasks are left" in taskset.report
    with pytest.raises(UserError, match="every prompt is longer than 2 tokens"):
        load(long, max_prompt_tokens=2)


def test_characters_that_the_tokenizer_does_not_know_are_told(tmp_path):
    path = tmp_path / "asked.jsonl"
    path.write_text('{"prompt": "What is 2+3?"}\n{"prompt": "4 + 5 ="}\n')
    data = DataConfig(sources=[DataSource(path=str(path))])
    (_, told) = load_tasks(data, split="train", tokenizer=load_tokenizer(RoleConfig(model="quickstart")), seed=0).report
    assert told == "asked: the tokenizer has no tokens for ? a h i s t w, so the model does not see them in its prompts"
    assert len(load_tasks(data, split="train", tokenizer=byte_tokenizer(), seed=0).report) == 1
