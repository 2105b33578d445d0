"""Formats of data with answers: how each is recognised and read, and what is said of rows that cannot be used."""

import pytest
from rlhf_rows.examples import ALPACA, ALPACA_INPUT, Example, Reading
from rlhf_rows.formats import FORMATS, NAMES, detect
from rlhf_rows.load_units import load_units
from rlhf_rows.units import Row

from rlhf_host.config.schema import DataConfig
from rlhf_host.data.bad_rows import Malformed
from rlhf_host.data.messages import UNTRAINED
from rlhf_host.data.row_context import RowContext
from rlhf_host.errors import UserError

SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "hi"}
GOOD, BAD = {"role": "assistant", "content": "hello"}, {"role": "assistant", "content": "go away"}
MORE = {"role": "user", "content": "more"}
PAIR = ({"label": 1.0}, {"label": 0.0})
HH = "\n\nHuman: hi\n\nAssistant: Hey.\n\nHuman: more\n\nAssistant:"
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def of(sender, value):
    return {"from": sender, "value": value}


TABLE = [
    ("messages", "prompt_completion", {"messages": [SYSTEM, USER, GOOD]}, Example([], ([SYSTEM, USER, GOOD],))),
    (
        "messages",
        "prompt_completion",
        {"messages": [USER, {**BAD, "weight": 0, "name": None}, MORE, {**GOOD, "train": True}], "tools": '[{"name": "add"}]'},
        Example(
            [],
            ([USER, {**BAD, UNTRAINED: True}, MORE, GOOD],),
            beside=RowContext(tools=[{"type": "function", "function": {"name": "add"}}]),
        ),
    ),
    (
        "messages",
        "prompt_completion",
        {"conversations": [USER, {**GOOD, "train": False}]},
        Example([], ([USER, {**GOOD, UNTRAINED: True}],)),
    ),
    ("prompt_completion", "prompt_completion", {"prompt": "1+1=", "completion": "2"}, Example("1+1=", ("2",))),
    ("prompt_completion", "prompt_completion", {"prompt": [USER], "completion": [GOOD]}, Example([USER], ([GOOD],))),
    ("generated", "prompt_completion", {"prompt": "a", "completion": "b", "reward": 0.5}, Example("a", ("b",), ({"reward": 0.5},))),
    ("text", "prompt_completion", {"text": "Once upon a time."}, Example("", ("Once upon a time.",))),
    ("preference", "preference", {"prompt": "p", "chosen": "a", "rejected": "b"}, Example("p", ("a", "b"), PAIR)),
    (
        "preference",
        "preference",
        {"prompt": "p", "chosen": "a", "rejected": "b", "margin": 2},
        Example("p", ("a", "b"), ({"label": 1.0, "margin": 2.0}, {"label": 0.0, "margin": 2.0})),
    ),
    ("preference", "preference", {"chosen": [USER, GOOD], "rejected": [USER, BAD]}, Example([USER], ([GOOD], [BAD]), PAIR)),
    (  # the text prompt is the conversation's first message again
        "preference",
        "preference",
        {"prompt": "hi", "chosen": [USER, GOOD], "rejected": [USER, BAD], "messages": [USER, GOOD]},
        Example([USER], ([GOOD], [BAD]), PAIR),
    ),
    ("preference", "preference", {"prompt": [USER], "chosen": GOOD, "rejected": BAD}, Example([USER], ([GOOD], [BAD]), PAIR)),
    (  # an answer is left, although one conversation begins with the whole of the other
        "preference",
        "preference",
        {"chosen": [USER, GOOD], "rejected": [USER, GOOD, MORE, BAD]},
        Example([USER], ([GOOD], [GOOD, MORE, BAD]), PAIR),
    ),
    (
        "triple",
        "triple",
        {"prompt": "p", "chosen": "a", "rejected": "b", "reference": "c"},
        Example("p", ("a", "b", "c"), (*PAIR, {"gold": 1.0})),
    ),
    (
        "triple",
        "triple",
        {"chosen": [USER, GOOD], "rejected": [USER, BAD], "reference": [USER, GOOD, MORE, BAD]},
        Example([USER], ([GOOD], [BAD], [GOOD, MORE, BAD]), (*PAIR, {"gold": 1.0})),
    ),
    ("hh", "preference", {"chosen": HH + " Yes.", "rejected": HH + " Yet"}, Example(HH, (" Yes.", " Yet"), PAIR, own_turns=True)),
    ("unpaired", "unpaired", {"prompt": "p", "completion": "c", "label": True}, Example("p", ("c",), ({"label": 1.0},))),
    ("unpaired", "unpaired", {"prompt": [USER], "completion": [BAD], "label": 0}, Example([USER], ([BAD],), ({"label": 0.0},))),
    ("kto_tag", "unpaired", {"messages": [USER, BAD], "kto_tag": False}, Example([USER], ([BAD],), ({"label": 0.0},))),
    (
        "kto_tag",
        "unpaired",
        {"conversations": [of("human", "hi"), of("gpt", "hello")], "kto_tag": True},
        Example([USER], ([GOOD],), ({"label": 1.0},)),
    ),
    ("preference", "unpaired", {"prompt": "p", "chosen": "a", "rejected": "b"}, Example("p", ("a", "b"), PAIR)),
    (
        "stepwise",
        "stepwise",
        {"prompt": "p", "completions": ["one", "two"], "labels": [True, 0.25]},
        Example("p", ("onetwo",), steps=(("one", 1.0), ("two", 0.25))),
    ),
    (
        "sharegpt",
        "prompt_completion",
        {"conversations": [of("human", "hi"), of("gpt", "hello")], "system": "be brief"},
        Example([], ([USER, GOOD],), beside=RowContext(system="be brief")),
    ),
    (
        "sharegpt",
        "prompt_completion",
        {
            "conversations": [
                of("human", "hi"),
                of("function_call", '{"name": "add", "arguments": {"a": 1}}'),
                of("observation", "2"),
                of("gpt", "hello"),
            ]
        },
        Example([], ([USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "2"}, GOOD],)),
    ),
    (
        "sharegpt",
        "preference",
        {"conversations": [of("human", "hi")], "chosen": of("gpt", "hello"), "rejected": of("gpt", "go away")},
        Example([USER], ([GOOD], [BAD]), PAIR),
    ),
    (
        "alpaca",
        "prompt_completion",
        {"instruction": "Add.", "input": "1 2", "output": "3", "system": "be brief", "history": [["hi", "hello"]]},
        Example([SYSTEM, USER, GOOD, {"role": "user", "content": "Add.\n\n1 2"}], ([{"role": "assistant", "content": "3"}],)),
    ),
    (
        "tokens",
        "prompt_completion",
        {"prompt_ids": [1, 2], "completion_ids": [3, 4]},
        Example("", (), tokens=(Row([1, 2], [3, 4], ((0, 2),)),)),
    ),
    (
        "tokens",
        "prompt_completion",
        {"input_ids": [1, 2, 3, 4, 5], "labels": [-100, 2, -100, -100, 5]},
        Example("", (), tokens=(Row([1], [2, 3, 4, 5], ((0, 1), (3, 4))),)),
    ),
    ("tokens", "prompt_completion", {"input_ids": [1, 2, 3]}, Example("", (), tokens=(Row([1], [2, 3], ((0, 2),)),))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "row", "example"), TABLE, ids=[f"{name}-{kind}" for name, kind, *_ in TABLE])
def test_each_format_is_recognised_by_its_columns_and_read(name, kind, row, example):
    how, why = detect([row], kind, None, where="data.jsonl")
    assert (how.name, why) == (name, f"it has {how.columns}")
    assert how.read(row, Reading()) == example
    assert detect([row], kind, name, where="data.jsonl") == (how, "data.format")


def test_every_format_is_in_the_table_and_among_the_settings():
    assert {name for name, *_ in TABLE} == set(NAMES)
    for name in NAMES:
        assert DataConfig(format=name).format == name
    with pytest.raises(ValueError, match="format"):
        DataConfig(format="alpacca")
    kinds = {kind for each in FORMATS for kind in each.kinds}
    assert kinds == {"prompt_completion", "preference", "triple", "unpaired", "rated", "stepwise"}


def test_a_transcript_becomes_a_conversation_where_that_is_wanted():
    read, chat = next(each.read for each in FORMATS if each.name == "hh"), Reading(hh_chat=True)
    example = read({"chosen": HH + " Yes.", "rejected": HH + " No.\n"}, chat)
    said = [("user", "hi"), ("assistant", "Hey."), ("user", "more")]
    answers = tuple([{"role": "assistant", "content": text}] for text in ("Yes.", "No."))
    assert example == Example([{"role": role, "content": text} for role, text in said], answers, PAIR)
    with pytest.raises(Malformed, match="turn 1 of the transcript is empty"):
        read({key: "\n\nHuman: \n\nAssistant: " + text for key, text in (("chosen", "a"), ("rejected", "b"))}, chat)


def test_alpaca_without_a_chat_template_is_the_text_that_alpaca_wrote():
    read, plain = next(each.read for each in FORMATS if each.name == "alpaca"), Reading(chat=False)
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    prompt = f"{ALPACA_INPUT}\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n"
    assert read(row, plain) == Example(prompt, ("3",), own_turns=True)
    assert read({**row, "input": ""}, plain).prompt == f"{ALPACA}\n\n### Instruction:\nAdd.\n\n### Response:\n"
    with pytest.raises(Malformed, match="'history' has earlier turns, which need a chat template"):
        read({**row, "history": [["a", "b"]]}, plain)


def test_other_columns_do_not_matter_and_rows_decide_together():
    rows = [{"chosen": HH + " a", "rejected": HH + " b", "id": 7}] * 3 + [{"chosen": 1, "rejected": None}]
    assert detect(rows, "preference", None, where="x")[0].name == "hh"


# --- what cannot be told ------------------------------------------------------------------------


def refusal(kind, *rows, wanted=None, **options):
    with pytest.raises(UserError) as caught:
        detect(rows, kind, wanted, where="data.jsonl", **options)
    return str(caught.value)


def test_data_for_another_algorithm_is_named():
    text = refusal("preference", {"messages": [USER, GOOD]}, needed_by="dpo")
    assert text.startswith(
        "data.jsonl: dpo needs preference data; this is messages (messages (role, content)), for algorithms that train on "
        "prompt_completion data. preference data is preference (chosen, rejected, and prompt or messages); hh ("
    )


def test_judged_completions_are_not_imitated_unless_that_is_asked_for():
    row = {"prompt": "p", "completion": "c", "label": False}
    assert "this is unpaired (prompt, completion, label)" in refusal("prompt_completion", row)
    assert detect([row], "prompt_completion", "prompt_completion", where="x")[0].name == "prompt_completion"


def test_several_readings_are_a_question():
    row = {"text": "a b", "instruction": "a", "output": "b"}
    assert refusal("prompt_completion", row) == (
        "data.jsonl: columns text, instruction, output can be read in several ways, text (text); alpaca (instruction, output): "
        "choose with --data.format"
    )


def test_no_reading_names_the_nearest():
    text = refusal("stepwise", {"prompt": "p", "steps": ["a"], "labels": [1]})
    assert text == (
        "data.jsonl: cannot tell the format of columns prompt, steps, labels. the algorithm needs stepwise data: stepwise "
        "(prompt, completions, labels); rename the columns, or choose with --data.format"
    )


def test_a_format_of_another_kind_is_refused_by_name():
    assert refusal("stepwise", {"text": "a"}, wanted="text", needed_by="prm") == (
        "data.jsonl: prm needs stepwise data, and data.format text is none: choose one of stepwise"
    )
    assert refusal("stepwise", {}, wanted="txt").startswith(
        "data.format 'txt' is not known; did you mean 'text'?; known are messages,"
    )


def test_dialogues_without_prompt_are_never_cut_by_characters():
    row = {"chosen": "Q: 1+1? A: 2", "rejected": "Q: 1+1? A: 3"}
    assert refusal("preference", row) == (
        "data.jsonl: chosen and rejected are texts without a prompt: say where the answer begins with --data.split-at TEXT, the "
        "text before every answer (such as 'Assistant:'), or add a column prompt"
    )
    how, _ = detect([row], "preference", None, where="x", split_at=True)
    assert how.read(row, Reading(split_at="A:")) == Example("Q: 1+1? A:", (" 2", " 3"), PAIR, own_turns=True)


# --- broken rows --------------------------------------------------------------------------------

A_PAIR = {"prompt": "p", "chosen": "a", "rejected": "b"}
BROKEN = [
    ("prompt_completion", {"prompt": "p"}, "no 'completion' (the answer); the row has prompt"),
    ("prompt_completion", {"prompt": "p", "completion": " \n"}, "'completion' is empty"),
    ("prompt_completion", {"prompt": "", "completion": "c"}, "'prompt' is empty"),
    ("prompt_completion", {"prompt": "p", "completion": None}, "'completion' must be a text, not null"),
    ("prompt_completion", {"prompt": "p", "completion": 7}, "'completion' must be a text, not a number"),
    (
        "prompt_completion",
        {"prompt": "p", "completion": "\ud800"},
        "'completion' has half a character, '\\ud800': no tokenizer can read it",
    ),
    (
        "prompt_completion",
        {"prompt": "p", "completion": "x" * 1_000_001},
        "'completion' has 1,000,001 characters, more than 1,000,000",
    ),
    (
        "prompt_completion",
        {"prompt": "p", "completion": [USER]},
        "'completion' must end with an assistant's message, not one of the role 'user'",
    ),
    ("preference", {**A_PAIR, "rejected": "a"}, "'chosen' and 'rejected' are equal"),
    ("triple", {**A_PAIR, "reference": A_PAIR["rejected"]}, "'reference' and 'rejected' are equal"),
    ("triple", {**A_PAIR, "reference": [GOOD]}, "'reference' and 'rejected' must both be texts or both be lists of messages"),
    (
        "triple",
        {"chosen": [USER, GOOD, MORE, GOOD], "rejected": [USER, GOOD, MORE, BAD], "reference": [USER, BAD]},
        "'reference' and 'chosen' do not answer the same prompt",
    ),
    ("preference", {**A_PAIR, "rejected": ""}, "'rejected' is empty"),
    ("preference", {**A_PAIR, "chosen": [GOOD]}, "'chosen' and 'rejected' must both be texts or both be lists of messages"),
    (
        "preference",
        {"chosen": [USER, GOOD], "rejected": [MORE, GOOD]},
        "'chosen' and 'rejected' have no first message in common, so there is no prompt",
    ),
    ("preference", {**A_PAIR, "margin": "big"}, "'margin' must be a finite number, not 'big'"),
    ("hh", {"chosen": HH + " a", "rejected": "Human: hi"}, "'rejected' does not begin with '\\n\\nHuman:', as the others do"),
    (
        "hh",
        {"chosen": HH + " a", "rejected": HH + " "},
        "the answer of 'rejected', after the last '\\n\\nAssistant:', is empty",
    ),
    (
        "hh",
        {"chosen": HH + " a", "rejected": "\n\nHuman: x\n\nAssistant: a"},
        "the texts before the last '\\n\\nAssistant:' differ between 'chosen' and 'rejected'",
    ),
    (
        "hh",
        {"chosen": HH + " a", "rejected": "\n\nHuman: x"},
        "'rejected' has no '\\n\\nAssistant:', after which the answer begins",
    ),
    ("messages", {"messages": []}, "'messages' has no messages"),
    ("messages", {"messages": "hi"}, "'messages' must be a list of messages, not a text"),
    ("messages", {"messages": [{"role": "user"}, GOOD]}, "'messages': message 1 (user) must have a text as content, not null"),
    ("messages", {"messages": [{"content": "x"}]}, '\'messages\': message 1 must be {"role": ..., "content": ...}'),
    (
        "messages",
        {"messages": [USER, {"role": "asistant", "content": "x"}]},
        "'messages': message 2 (asistant) has an unknown role; did you mean 'assistant'?; known are system, "
        "developer, user, assistant, tool, function, ipython",
    ),
    ("messages", {"messages": [USER, {**GOOD, "content": ""}]}, "'messages': message 2 (assistant) is empty"),
    (
        "messages",
        {"messages": [USER, {**GOOD, "weight": 0.5}]},
        "'messages': message 2 (assistant): 'weight' must be 0 or 1, or true or false, not 0.5"
        " (data.ignore weight leaves it unread)",
    ),
    ("messages", {"messages": [SYSTEM, USER]}, "no message of the assistant is trained"),
    ("messages", {"messages": [USER, {**GOOD, "train": False}]}, "no message of the assistant is trained"),
    (
        "messages",
        {"messages": [USER, GOOD], "tools": "{"},
        "'tools' is a text that is not JSON (data.ignore tools leaves it unread)",
    ),
    (
        "sharegpt",
        {"conversations": [of("robot", "x")]},
        "'conversations[0]' is from 'robot'; known are human, user, gpt, assistant, system, function_call, observation, tool",
    ),
    (
        "sharegpt",
        {"conversations": [of("human", "x"), of("function_call", "add(1)")]},
        '\'conversations[1]\': a function_call must be JSON: {"name": ..., "arguments": ...}',
    ),
    ("unpaired", {"prompt": "p", "completion": "c", "label": 0.5}, "'label' must be true or false, 1 or 0, not 0.5"),
    (
        "kto_tag",
        {"messages": [USER], "kto_tag": True},
        "'messages' must end with the assistant's message that the label is about",
    ),
    (
        "stepwise",
        {"prompt": "p", "completions": ["a"], "labels": [1, 0]},
        "'completions' and 'labels' must be lists of one length",
    ),
    ("stepwise", {"prompt": "p", "completions": ["a"], "labels": [2]}, "'labels' must be a number from 0 to 1, not 2"),
    ("alpaca", {"instruction": "i", "output": "o", "input": 3}, "'input' must be a text, not a number"),
    ("tokens", {"prompt_ids": [1], "completion_ids": [9999]}, "'completion_ids' has the token 9999, and the tokenizer has 261"),
    (
        "tokens",
        {"prompt_ids": [], "completion_ids": [1]},
        "'prompt_ids' is empty: the first completion token needs a token before it",
    ),
    (
        "tokens",
        {"input_ids": [1, 2], "labels": [-100, 3]},
        "'labels' has 3 at 1 where 'input_ids' has 2: a label is the token itself, or -100",
    ),
    ("tokens", {"input_ids": [1, 2], "labels": [1, -100]}, "'labels' has no token to train after the first"),
]


@pytest.mark.parametrize(("name", "row", "message"), BROKEN, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(BROKEN)])
def test_a_broken_row_stops_with_its_place_or_is_left_out(name, row, message, chatml):
    kind = next(each.kinds[0] for each in FORMATS if each.name == name)
    good = next(row for known, its_kind, row, _ in TABLE if (known, its_kind) == (name, kind))
    rows = {"python:data": [good] * 10 + [row] + [good]}
    data = DataConfig(sources=[{"path": "python:data"}], format=name)
    with pytest.raises(UserError) as caught:
        load_units(data, kind=kind, split="train", tokenizer=chatml, rows=rows)
    assert str(caught.value) == f"data[10]: {message} (data.on_bad_row skip leaves such rows out)"
    units = load_units(data.model_copy(update={"on_bad_row": "skip"}), kind=kind, split="train", tokenizer=chatml, rows=rows)
    assert len(units) == 11
    assert any(
        line.startswith("data: left out 1 bad row of 12 (1 × ") and line.endswith(f"the first at data[10]: {message}")
        for line in units.report
    )
