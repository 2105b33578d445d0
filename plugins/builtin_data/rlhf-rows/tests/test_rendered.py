"""Texts that are rendered already, bring their end, or are conversations that a table has as text."""

import json

import datasets
import pytest

from .reading import HELPFUL, OPENS, asked, read, refused, said, turn, user

RENDERED = turn("user", "Say hi") + OPENS


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("prompt_completion", {"prompt": RENDERED, "completion": "hi<|im_end|>\n"}),
        ("prompt_completion", {"prompt": "Say hi", "completion": OPENS + "hi"}),
        ("prompt_completion", {"messages": [user(RENDERED), said("hi")]}),
        ("prompt_completion", {"messages": [user("Say hi"), said(OPENS + "hi")]}),
        ("prompt_completion", {"instruction": RENDERED, "output": "hi"}),
        ("preference", {"prompt": RENDERED, "chosen": "hi<|im_end|>\n", "rejected": "no<|im_end|>\n"}),
        ("preference", {"prompt": "Say hi", "chosen": OPENS + "hi<|im_end|>\n", "rejected": OPENS + "no<|im_end|>\n"}),
        ("stepwise", {"prompt": RENDERED, "completions": ["a"], "labels": [1]}),
    ],
)
def test_a_text_that_is_rendered_already_is_not_rendered_again(kind, row):
    problem = refused(read, [row], kind)
    assert "is rendered already: it has '<|im_start|>" in problem
    assert "set data.template to none, which takes texts as they are, or give plain messages" in problem


def test_taken_as_it_is_it_has_one_end_of_turn():
    for completion in ("hi", "hi<|im_end|>", "hi<|im_end|>\n", "hi<|im_end|> \n\n"):
        assert read([{"prompt": RENDERED, "completion": completion}], template_of="none") == [RENDERED + "⟦hi<|im_end|>⟧"]
    pair = {"prompt": RENDERED, "chosen": "hi<|im_end|>\n", "rejected": "no"}
    expected = [RENDERED + f"⟦{each}<|im_end|>⟧" for each in ("hi", "no")]
    assert read([pair], "preference", template_of="none") == expected
    assert asked([{"prompt": RENDERED}], template_of="none") == [RENDERED]
    assert "is rendered already" in refused(asked, [{"prompt": RENDERED}])
    for how, row in ((read, {"prompt": RENDERED, "completion": "a"}), (asked, {"prompt": RENDERED})):
        assert "no system message can be put before it" in refused(how, [{**row, "system": "Be brief."}], template_of="none")


@pytest.mark.parametrize("end", ["<|im_end|>", "<|im_end|>\n", "<|im_end|><|im_end|>", "<|im_end|>\n<|im_end|>"])
def test_an_answer_that_brings_its_end_gets_no_second_one(end):
    expected = [HELPFUL + turn("user", "q") + OPENS + "⟦a<|im_end|>⟧"]
    assert read([{"prompt": "q", "completion": "a" + end}]) == expected
    assert read([{"messages": [user("q"), said("a" + end)]}]) == expected
    assert read([{"messages": [user("q" + end), said("a")]}]) == expected
    assert read([{"instruction": "q", "output": "a" + end}]) == expected
    assert read([{"prompt": "q", "chosen": "a" + end, "rejected": "b" + end}], "preference")[0] == expected[0]
    assert read([{"text": "Once." + end}]) == ["O⟦nce.<|im_end|>⟧"]


def test_other_models_marks_of_turns_are_refused():
    for prompt in (
        "[INST] q [/INST]",
        "<start_of_turn>user\nq<end_of_turn>\n",
        "<|start_header_id|>user<|end_header_id|>\n\nq",
    ):
        for how, row in ((read, {"prompt": prompt, "completion": "a"}), (asked, {"prompt": prompt})):
            assert "is rendered already, in the chat template of another model: it has '" in refused(how, [row])
            assert how([row], template=None)
    for row in ({"prompt": "q", "completion": "a</s>"}, {"messages": [user("q"), said("a<|eot_id|>\n")]}, {"text": "a</s>"}):
        assert "and here turns end with '<|im_end|>': take it out of the row" in refused(read, [row])


def test_a_text_is_trained_with_an_end():
    """As in TRL: everything but the first token, and an end-of-sequence token where the text brings none."""
    assert read([{"text": "Once."}]) == ["O⟦nce.<|im_end|>⟧"]
    assert read([{"text": RENDERED + "hi<|im_end|>\n"}]) == [
        f"<|im_start|>⟦{RENDERED.removeprefix('<|im_start|>')}hi<|im_end|>⟧"
    ]


TALK = [user('it\'s "q"\nor not'), said("a")]


@pytest.mark.parametrize(
    "written", [json.dumps, repr, lambda value: json.dumps(value, indent=1)], ids=["json", "python", "indented"]
)
def test_conversations_that_a_table_has_as_text_are_conversations(write, written):
    expected = [HELPFUL + turn("user", TALK[0]["content"]) + OPENS + "⟦a<|im_end|>⟧"]

    def table(**columns):
        frame = datasets.Dataset.from_list([columns]).to_pandas()
        return write(f"{'-'.join(columns)}.csv", frame.to_csv(index=False))

    sharegpt = [{"from": "human", "value": TALK[0]["content"]}, {"from": "gpt", "value": "a"}]
    assert read(table(messages=written(TALK))) == expected
    assert read(table(conversations=written(sharegpt))) == expected
    assert read(table(prompt=written(TALK[:1]), completion=written(TALK[1:]))) == expected
    assert read(table(prompt=written(TALK[:1]), completion="a")) == expected
    assert read(table(messages=written([{"id": 1, **each} for each in TALK]))) == expected
    both = {"chosen": written(TALK), "rejected": written([TALK[0], said("b")])}
    assert read(table(**both), "preference")[0] == expected[0]
    assert asked(table(prompt=written(TALK[:1]))) == [expected[0].partition("⟦")[0]]


def test_what_looks_like_a_conversation_and_is_none_is_refused_or_text():
    broken = "[{'role': 'user', 'content': 'q'}\n {'role': 'assistant', 'content': 'a'}]"  # as numpy writes it
    for how, row in ((read, {"messages": broken}), (asked, {"prompt": broken}), (read, {"prompt": broken, "completion": "a"})):
        assert "a list of messages as a text, and neither JSON nor Python's" in refused(how, [row])
    for answer in ('{"role": "admin"}', '[{"from": "A"}]', '{"role": "admin", ...', "[1, 2]"):
        assert f"⟦{answer}<|im_end|>⟧" in read([{"prompt": "q", "completion": answer}])[0]
