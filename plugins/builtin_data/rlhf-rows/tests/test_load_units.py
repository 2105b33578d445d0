"""From data settings to units: what is read, bounded in length, counted and said."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from rlhf_authoring.models import tiny_tokenizer
from rlhf_rows.examples import Reading, read_hh
from rlhf_rows.load_units import load_units

from rlhf_host.config.schema import DataConfig
from rlhf_host.data.bad_rows import Malformed
from rlhf_host.data.stream import TaskStream
from rlhf_host.errors import UserError
from rlhf_host.records.numbers import Numbers

from .conftest import byte_tokenizer
from .habits import REASONING

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
USER, MORE = {"role": "user", "content": "hi"}, {"role": "user", "content": "more"}
YES, NO = {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "no"}


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def pair(number, **columns):
    return {"prompt": f"{number}?", "chosen": "yes", "rejected": "no", **columns}


@pytest.fixture
def load(plain):
    def make(*sources, kind="prompt_completion", tokenizer=plain, max_tokens=None, rows=None, **settings):
        chosen = [source if isinstance(source, dict) else {"path": source} for source in sources]
        data = DataConfig(sources=chosen, **settings)
        return load_units(data, kind=kind, split="train", tokenizer=tokenizer, max_tokens=max_tokens, rows=rows or {})

    return make


def texts(units, tokenizer, name=None):
    (only,) = units.sources if name is None else (name,)
    return [
        tuple(tokenizer.decode([*row.prompt_ids, *row.completion_ids]) for row in unit.rows) for unit in units.sources[only]
    ]


def test_pairs_of_a_file_are_units_of_two_rows_in_file_order(load, write, plain):
    path = write("pairs.jsonl", lines(pair(1), pair(2, margin=0.5)))
    units = load(path, kind="preference")
    assert texts(units, plain) == [("1?yes<|im_end|>", "1?no<|im_end|>"), ("2?yes<|im_end|>", "2?no<|im_end|>")]
    chosen, rejected = units.sources["pairs"][1].rows
    assert chosen.columns == {"label": 1.0, "margin": 0.5}
    assert rejected.columns == {"label": 0.0, "margin": 0.5}
    assert (chosen.trained, rejected.trained) == (((0, 4),), ((0, 3),))
    assert isinstance(chosen.prompt_ids, Numbers)
    assert units.weights == {"pairs": 1.0}
    assert units.report == [
        f"pairs: 2 pairs from {path}, read as preference (it has chosen, rejected, and prompt or messages); as plain text; "
        "prompt 2 to 2 tokens",
        "pairs: first row, trained tokens in ⟦⟧: 1?⟦yes<|im_end|>⟧ — turn ends with `<|im_end|>` (trained)",
    ]


def test_pairs_are_two_rows_where_single_judgements_are_wanted_and_this_is_said(load, write, plain):
    units = load(write("pairs.jsonl", lines(pair(1, margin=3))), kind="unpaired")
    assert texts(units, plain) == [("1?yes<|im_end|>",), ("1?no<|im_end|>",)]
    assert [unit.rows[0].columns for unit in units.sources["pairs"]] == [{"label": 1.0}, {"label": 0.0}]
    assert ", each pair as two rows, of which the chosen one is desirable; " in units.report[0]


def test_a_conversation_is_shown_with_its_trained_tokens(load, write, chatml):
    units = load(write("talks.jsonl", lines({"messages": [USER, YES, MORE, NO]})), tokenizer=chatml)
    assert units.report[0].endswith("in the tokenizer's chat template; prompt 47 to 47 tokens")
    assert units.report[-1].endswith(
        "<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n⟦yes<|im_end|>⟧\\n<|im_start|>user\\nmore<|im_end|>\\n"
        "<|im_start|>assistant\\n⟦no<|im_end|>⟧ — turn ends with `<|im_end|>` (trained)"
    )


def test_turns_that_the_template_changes_are_counted(load, write):
    tokenizer = byte_tokenizer(REASONING)
    units = load(write("talks.jsonl", lines({"messages": [USER, YES, MORE, NO]})), tokenizer=tokenizer)
    assert len(units) == 2
    assert "talks: 1 turns are rows of their own, because the chat template changes them once others follow" in units.report
    with pytest.raises(UserError, match=r"talks\.jsonl:1: the chat template changes 1 of 2 trained turns"):
        load(write("talks.jsonl", lines({"messages": [USER, YES, MORE, NO]})), tokenizer=tokenizer, history="refuse")


# --- length -------------------------------------------------------------------------------------


def test_a_long_answer_is_cut_and_no_end_is_put_where_it_was_cut(load, write, plain):
    rows = [
        {"prompt": "ab", "completion": "cdefgh"},
        {"prompt": "ab", "completion": "cd"},
        {"prompt": "abcde", "completion": "f"},
    ]
    path = write("rows.jsonl", lines(*rows))
    units = load(path, max_tokens=5)
    assert texts(units, plain) == [("abcde",), ("abcd<|im_end|>",)]
    assert units.sources["rows"][0].rows[0].trained == ((0, 3),)
    assert "rows: cut the end of the answer of 1 rows longer than 5 tokens" in units.report
    assert "rows: left out 1 rows longer than 5 tokens" in units.report
    assert texts(load(path, max_tokens=5, long_rows="filter"), plain) == [("abcd<|im_end|>",)]


def test_the_smaller_of_setting_and_context_bounds_rows(plain):
    rows = {"python:rows": [{"prompt": "ab", "completion": "cdefgh"}]}
    for setting, context, kept in ((5, 9, 5), (9, 5, 5), (None, 5, 5), (None, None, 9)):
        data = DataConfig(sources=[{"path": "python:rows"}], max_tokens=setting)
        units = load_units(data, kind="prompt_completion", split="train", tokenizer=plain, max_tokens=context, rows=rows)
        (row,) = units.sources["rows"][0].rows
        assert len(row.prompt_ids) + len(row.completion_ids) == kept


def test_pairs_that_are_too_long_are_left_out_whole(load, write, plain):
    long = {"prompt": "p", "chosen": "c" * 20, "rejected": "r"}
    path = write("pairs.jsonl", lines(pair(1), long))
    units = load(path, kind="preference", max_tokens=10)
    assert texts(units, plain) == [("1?yes<|im_end|>", "1?no<|im_end|>")]
    assert "pairs: left out 1 pairs longer than 10 tokens" in units.report
    units = load(path, kind="preference", max_tokens=10, long_rows="truncate")
    assert texts(units, plain)[1] == ("p" + "c" * 9, "pr<|im_end|>")
    alike = write("alike.jsonl", lines(pair(1), {"prompt": "p", "chosen": "same 1", "rejected": "same 2"}))
    assert len(load(alike, kind="preference", max_tokens=6, long_rows="truncate")) == 1  # what is left of them is equal


def test_spans_and_step_labels_are_cut_with_the_tokens(load, write, chatml, plain):
    talk = write("talks.jsonl", lines({"messages": [USER, YES, MORE, NO]}))
    whole = load(talk, tokenizer=chatml).sources["talks"][0].rows[0]
    begin = whole.trained[1][0]
    (unit,) = load(talk, tokenizer=chatml, max_tokens=len(whole.prompt_ids) + begin + 1).sources["talks"]
    assert unit.rows[0].trained == (whole.trained[0], (begin, begin + 1))
    (unit,) = load(talk, tokenizer=chatml, max_tokens=len(whole.prompt_ids) + begin).sources["talks"]
    assert unit.rows[0].trained == whole.trained[:1]
    steps = write("steps.jsonl", lines({"prompt": "p", "completions": ["one", "two"], "labels": [True, False]}))
    (unit,) = load(steps, kind="stepwise", max_tokens=6, long_rows="truncate").sources["steps"]
    assert plain.decode(unit.rows[0].completion_ids) == "one\nt"
    assert (unit.rows[0].trained, len(unit.rows[0].token_columns["step"])) == (((3, 4),), 5)


def test_nothing_left_is_an_error(load, write):
    with pytest.raises(UserError, match=r"^no rows are left: all are longer than 2 tokens, which is all that data\.max_tokens"):
        load(write("rows.jsonl", lines({"prompt": "abc", "completion": "d"})), max_tokens=2)


# --- sources ------------------------------------------------------------------------------------


def test_several_sources_have_weights_and_share_the_samples(load, write, plain):
    one = write("one.jsonl", lines(*({"text": f"1{i}"} for i in range(9))))
    two = write("two.csv", "prompt,completion\n" + "".join(f"2,{i}\n" for i in range(9)))
    units = load({"path": one, "weight": 2}, two, max_samples=6)
    assert {name: len(each) for name, each in units.sources.items()} == {"one": 4, "two": 2}
    assert units.weights == {"one": 2.0, "two": 1.0}
    assert texts(units, plain, "two") == [("20<|im_end|>",), ("21<|im_end|>",)]
    assert len(load({"path": one, "max_samples": 3})) == 3


def test_rows_of_python_and_keys_of_a_source(load, plain):
    rows = {"python:mine": [{"question": "1?", "completion": "a", "good": True}]}
    source = {"path": "python:mine", "prompt_key": "question", "label_key": "good"}
    units = load(source, kind="unpaired", rows=rows, format="unpaired")
    assert texts(units, plain) == [("1?a<|im_end|>",)]
    assert units.report[0].startswith("mine: 1 rows given in Python, read as unpaired (data.format); ")
    with pytest.raises(UserError, match="the data 'mine' was given in Python, and is not in a file"):
        load(source, kind="unpaired")


def test_keys_count_when_the_format_is_told_from_the_columns(load, write, plain):
    path = write("judged.csv", "question,completion,good\n1?,a,true\n2?,b,0\n")
    units = load({"path": path, "prompt_key": "question", "label_key": "good"}, kind="unpaired")
    assert texts(units, plain) == [("1?a<|im_end|>",), ("2?b<|im_end|>",)]
    assert [unit.rows[0].columns["label"] for unit in units.sources["judged"]] == [1.0, 0.0]


def test_numbers_of_tables_are_numbers(load, write):
    path = write("pairs.csv", "prompt,chosen,rejected,margin\np,a,b,0.5\n")
    assert load(path, kind="preference").sources["pairs"][0].rows[0].columns["margin"] == 0.5
    with pytest.raises(UserError, match="'margin' must be a finite number, not 'much'"):
        load(write("pairs.csv", "prompt,chosen,rejected,margin\np,a,b,much\n"), kind="preference")


def test_the_row_that_is_shown_is_one_that_was_not_cut(load, write):
    path = write("rows.jsonl", lines({"prompt": "ab", "completion": "cdefgh"}, {"prompt": "ab", "completion": "cd"}))
    assert load(path, max_tokens=5).report[-1].endswith("ab⟦cd<|im_end|>⟧ — turn ends with `<|im_end|>` (trained)")
    report = load({"path": path, "max_samples": 1}, max_tokens=5).report
    assert report[-1].endswith("ab⟦cde⟧ — the last trained token, `e`, is no stop token")


def test_the_units_are_drawn_as_tasks(load, write):
    units = load(write("pairs.jsonl", lines(*map(pair, range(5)))), kind="preference")
    draws = TaskStream(units.tasks(), seed=1).draw(5, 1)
    assert sorted(draw.task.index for draw in draws) == [0, 1, 2, 3, 4]
    assert {draw.task.source for draw in draws} == {"pairs"}


def test_what_is_no_data_is_an_error(load, write):
    with pytest.raises(UserError, match=r"empty\.jsonl has no rows"):
        load(write("empty.jsonl", ""))
    with pytest.raises(UserError, match=r"no such file or directory; did you mean 'empty\.jsonl'\?"):
        load(write("empty.jsonl", "") + "x")
    with pytest.raises(UserError, match=r"arithmetic.* gives prompts, and the algorithm needs preference data"):
        load("arithmetic", kind="preference")
    with pytest.raises(UserError, match="no data: give --data"):
        load()


# --- bad rows -----------------------------------------------------------------------------------


def test_a_bad_row_stops_with_file_and_line(load, write):
    path = write("pairs.jsonl", lines(pair(1)) + "\n" + lines(pair(2, chosen="no")))
    with pytest.raises(UserError) as caught:
        load(path, kind="preference")
    assert str(caught.value) == f"{path}:3: 'chosen' and 'rejected' are equal (data.on_bad_row skip leaves such rows out)"


def test_skipped_rows_are_counted_by_reason(load, write):
    broken = [{"prompt": "p", "completion": "c" * n} for n in (1_000_001, 1_000_002)] + [{"prompt": "p", "completion": ""}]
    path = write("rows.jsonl", lines(*broken, *({"prompt": "p", "completion": "c"} for _ in range(30))))
    units = load(path, on_bad_row="skip")
    assert len(units) == 30
    assert (
        f"rows: left out 3 bad rows of 33 (2 × 'completion' has N characters, more than N; 1 × 'completion' is empty), "
        f"the first at {path}:1: 'completion' has 1,000,001 characters, more than 1,000,000"
    ) in units.report


def test_many_bad_rows_are_an_error_all_the_same(load, write):
    path = write("pairs.jsonl", lines(*map(pair, range(8)), pair(8, chosen="no")))
    with pytest.raises(UserError) as caught:
        load(path, kind="preference", on_bad_row="skip")
    assert str(caught.value) == (
        f"{path}: left out 1 bad row of 9 (1 × 'chosen' and 'rejected' are equal), the first at {path}:9: 'chosen' and "
        "'rejected' are equal: more than 10% of the rows"
    )


def test_a_row_of_which_the_tokenizer_makes_nothing_is_a_bad_row_too(load, write):
    path = write("pairs.jsonl", lines(pair(1), pair(2, chosen="É")))
    with pytest.raises(UserError, match=r":2: the tokenizer has no token for the answer 'É' \(data\.on_bad_row skip"):
        load(path, kind="preference", tokenizer=tiny_tokenizer())


def test_the_first_bad_row_is_named_whatever_finds_it(load, write):
    """Row 6 is found when it is tokenised, and row 301 before, as the next batch is read."""
    rows = [{"prompt": f"{number}?", "completion": "c"} for number in range(600)]
    rows[5]["completion"], rows[300]["completion"] = "É", ""
    path = write("rows.jsonl", lines(*rows))
    with pytest.raises(UserError, match=r"rows\.jsonl:6: the tokenizer has no token for the answer 'É'"):
        load(path, tokenizer=tiny_tokenizer())
    units = load(path, tokenizer=tiny_tokenizer(), on_bad_row="skip")
    assert any(line.endswith(f"{path}:6: the tokenizer has no token for the answer 'É'") for line in units.report)
    assert len(units) == 598


# --- fingerprint --------------------------------------------------------------------------------


def test_the_fingerprint_is_of_tokens_spans_columns_and_order(load, write):
    def fingerprint(*rows, name="pairs.jsonl", **options):
        return load(write(name, lines(*rows)), kind="preference", **options).fingerprint

    same = fingerprint(pair(1), pair(2))
    assert fingerprint(pair(1, note="x"), pair(2)) == same
    others = [
        fingerprint(pair(2), pair(1)),
        fingerprint(pair(1)),
        fingerprint(pair(1), pair(2, margin=1)),
        fingerprint(pair(1), pair(2, margin=2)),
        fingerprint(pair(1), pair(2, chosen="yet")),
        fingerprint(pair(1), pair(2), name="others.jsonl"),
        fingerprint(pair(1), pair(2), system_prompt="S"),
    ]
    assert len({same, *others}) == 8
    spans = [load(write("t.jsonl", lines({"input_ids": [1, 2, 3], "labels": labels}))) for labels in ([1, 2, 3], [1, 2, -100])]
    assert spans[0].fingerprint != spans[1].fingerprint


# --- real data ----------------------------------------------------------------------------------


def test_dialogues_of_hh_are_split_before_the_last_answer_and_nothing_is_lost(load, plain):
    path = SHARED / "hh_harmless_test.jsonl.gz"
    if not path.exists():
        pytest.skip(f"needs {path}")
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    faults: Counter[str] = Counter()
    for row in rows:
        try:
            example = read_hh(row, Reading())
        except Malformed as fault:
            faults[str(fault)] += 1
            continue
        assert [f"{example.prompt}{completion}" for completion in example.completions] == [row["chosen"], row["rejected"]]
        assert str(example.prompt).endswith("\n\nAssistant:")
        assert not any("\n\nAssistant:" in completion for completion in example.completions)
    assert faults == {
        "the texts before the last '\\n\\nAssistant:' differ between 'chosen' and 'rejected'": 5,
        "the answer of 'chosen', after the last '\\n\\nAssistant:', is empty": 4,
    }
    units = load({"path": str(path), "max_samples": 300}, kind="preference", on_bad_row="skip")
    assert "300 pairs" in units.report[0]
    assert "read as hh (it has chosen and rejected that begin with a blank line and 'Human:'); as plain text" in units.report[0]
    good = (row for number, row in enumerate(rows, start=1) if number != 87)
    for row, unit in zip(good, units.sources["hh_harmless_test"], strict=False):
        texts = [plain.decode([*each.prompt_ids, *each.completion_ids]) for each in unit.rows]
        assert texts == [row["chosen"] + "<|im_end|>", row["rejected"] + "<|im_end|>"]
        assert all(each.trained == ((0, len(each.completion_ids)),) for each in unit.rows)


# --- conditions ---------------------------------------------------------------------------------------

SCORE = "{prompt} <rm_score>: {reward:.2f} "


def test_a_condition_writes_the_reward_into_the_prompt(load, write, plain):
    row = {"prompt": "1+1=", "completion": "2", "reward": 0.756}
    path = write("best.jsonl", lines(row))
    assert texts(load(path, condition=SCORE), plain) == [("1+1= <rm_score>: 0.76 2<|im_end|>",)]
    (only,) = load(path, condition=SCORE).sources["best"][0].rows
    assert only.columns == {"reward": 0.756}
    assert texts(load(path), plain) == [("1+1=2<|im_end|>",)]


def test_a_condition_changes_the_last_message_of_a_conversation(load, write, chatml):
    row = {"prompt": [USER, YES, MORE], "completion": [NO], "reward": 1}
    (only,) = texts(load(write("best.jsonl", lines(row)), condition=SCORE, tokenizer=chatml), chatml)[0]
    assert "more <rm_score>: 1.00" in only
    assert "hi <rm" not in only


@pytest.mark.parametrize(
    "condition", ["{prompt}", "{reward}", "{prompt} {reward} {score}", "{prompt} {reward", "{prompt} {reward:s}", ""]
)
def test_a_condition_without_its_fields_is_refused(load, write, condition):
    path = write("best.jsonl", lines({"prompt": "1+1=", "completion": "2", "reward": 0.5}))
    with pytest.raises(UserError, match=r"data\.condition"):
        load(path, condition=condition)


def test_a_condition_needs_rows_with_a_reward(load, write):
    path = write("rows.jsonl", lines({"prompt": "1+1=", "completion": "2"}))
    with pytest.raises(UserError, match=r"read as prompt_completion, and data\.condition is for rows with a reward"):
        load(path, condition=SCORE)
