"""Roles, keys and columns as other projects name them: followed, or refused with what to do."""

import json

import datasets
import pytest
from rlhf_authoring.models import TOOLS_TEMPLATE as QWEN

from .conftest import CHATML
from .reading import HELPFUL, OPENS, asked, lines, read, refused, said, turn, user

TALK = HELPFUL + turn("user", "q") + OPENS + "⟦a<|im_end|>⟧"

# --- who speaks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("asks", ["human", "prompter", "User", "USER"])
@pytest.mark.parametrize("answers", ["gpt", "chatgpt", "bard", "bing", "model", "Assistant", "bot"])
def test_roles_have_other_names_too(asks, answers):
    assert read([{"messages": [{"role": asks, "content": "q"}, {"role": answers, "content": "a"}]}]) == [TALK]
    assert read([{"conversations": [{"from": asks, "value": "q"}, {"from": answers, "value": "a"}]}]) == [TALK]
    prompt = [{"role": asks, "content": "q"}, {"role": answers, "content": "a"}, {"role": asks, "content": "r"}]
    expected = HELPFUL + turn("user", "q") + turn("assistant", "a") + turn("user", "r") + OPENS
    assert asked([{"prompt": prompt}]) == [expected]
    assert "'messages' ends with an assistant's message" in refused(asked, [{"messages": prompt[:2]}])


@pytest.mark.parametrize("results", ["tool_response", "function_response", "observation"])
def test_calls_and_results_have_roles_of_their_own_in_some_files(results):
    made = json.dumps({"name": "boil", "arguments": {"litres": 2}})
    expected = '⟦\n<tool_call>\n{"name": "boil", "arguments": {"litres": 2}}\n</tool_call><|im_end|>⟧'
    for calls in ("tool_call", "function_call"):
        roles = [("user", "q"), (calls, made), (results, "hot"), ("assistant", "a")]
        (text,) = read([{"messages": [{"role": role, "content": content} for role, content in roles]}], template=QWEN)
        assert expected in text
        assert text == read([{"conversations": [{"from": role, "value": text} for role, text in roles]}], template=QWEN)[0]


@pytest.mark.parametrize("name", ["arguments", "parameters", "input", "args"])
@pytest.mark.parametrize("given", [{"litres": 2}, '{"litres": 2}'], ids=["mapping", "text"])
def test_arguments_of_calls_have_other_names_too(name, given):
    made = {"name": "boil", name: given}
    expected = '⟦\n<tool_call>\n{"name": "boil", "arguments": {"litres": 2}}\n</tool_call><|im_end|>⟧'
    for calls in ([made], [{"type": "function", "function": made}], made, json.dumps([made])):
        assert read([{"messages": [user("q"), said("", tool_calls=calls)]}], template=QWEN)[0].endswith(expected)
    written = [{"from": "human", "value": "q"}, {"from": "function_call", "value": json.dumps(made)}]
    assert read([{"conversations": written}], template=QWEN)[0].endswith(expected)
    twice = {**made, "input": {"a": 1}, "parameters": {"a": 1}}
    assert "the call of 'boil' has both" in refused(read, [{"messages": [user("q"), said("", tool_calls=[twice])]}])


def test_messages_with_both_forms_of_keys_are_messages():
    both = [{"from": "human", "value": "q", "role": "user", "content": "q"}, said("a", **{"from": "gpt", "value": "a"})]
    assert read([{"conversations": both}]) == [TALK]


# --- keys of messages ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (said("a", refusal="I cannot."), "has 'refusal': write it as the content"),
        ({"role": "assistant", "content": None, "refusal": "I cannot."}, "has 'refusal': write it as the content"),
        (said("a", tools=[{"name": "boil"}]), "has 'tools': give them in a column of the row"),
        (said("a", functions=[{"name": "boil"}]), "has 'functions': give them in a column of the row"),
        (said("a", partial=True), "has 'partial': a message for the model to continue is not an answer"),
        (said("a", eot=False), "has 'eot' false, and every turn ends here"),
        (said("a", end_turn=False), "has 'end_turn' false, and every turn ends here"),
        (said("a", tool_plan="first boil"), "leaves out the 'tool_plan' of message 2 (assistant)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_keys_of_messages_that_cannot_be_followed_are_refused(message, problem):
    assert problem in refused(read, [{"messages": [user("q"), message]}])
    prompt = [user("q"), message, user("r")]
    assert problem in refused(asked, [{"prompt": prompt}])
    name = next(name for name in message if name not in ("role", "content"))
    if message["content"]:
        assert read([{"messages": [user("q"), message]}], ignore=[name]) == [TALK]


def test_keys_that_say_what_happens_anyway_are_read():
    plain = {"refusal": None, "tools": [], "partial": False, "eot": True, "end_turn": True, "annotations": [], "ipython": False}
    assert read([{"messages": [user("q", eot=True), said("a", **plain)]}]) == [TALK]


def test_a_share_of_a_weight_names_the_way_out():
    problem = refused(read, [{"messages": [user("q"), said("a", loss_scale=0.5)]}])
    assert "'loss_scale' must be 0 or 1, or true or false, not 0.5 (data.ignore loss_scale leaves it unread)" in problem


# --- columns ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "column", ["chat_template_kwargs", "apply_chat_template_kwargs", "template_kwargs", "reasoning_effort"]
)
def test_what_the_template_is_told_has_several_columns(column):
    told = "low" if column == "reasoning_effort" else {"reasoning_effort": "low"}
    reads = "{{ 'effort ' + reasoning_effort if reasoning_effort is defined else '' }}" + CHATML
    for how, row in ((read, {"messages": [user("q"), said("a")]}), (asked, {"prompt": "q"})):
        assert how([{**row, column: told}], template=reads)[0].startswith("effort low")
        assert "'reasoning_effort': the tokenizer's chat template does not read reasoning_effort" in refused(
            how, [{**row, column: told}]
        )
        assert how([{**row, column: told}], ignore=["reasoning_effort"])
        assert "the row has two values of 'reasoning_effort'" in refused(
            how, [{**row, "reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}], template=reads
        )
        assert f"'{column}' must be" in refused(how, [{**row, column: [1]}], template=reads)
        assert "'chat_template': the tokenizer's chat template is used (data.ignore chat_template" in refused(
            how, [{**row, "chat_template": "{{ x }}"}]
        )


@pytest.mark.parametrize(
    ("column", "refuses", "reads"),
    [
        ("assistant_masks", [0, 1], []),
        ("completion_mask", [0, 1], None),
        ("train_on_last_turn_only", True, False),
        ("last_turn_only", True, False),
        ("assistant_only_loss", False, True),
        ("mask_prompt", False, True),
        ("train", False, True),
        ("trainable", False, True),
        ("ignore", True, False),
        ("loss", "False", 2.31),
    ],
)
def test_columns_that_say_what_of_a_row_is_trained(column, refuses, reads):
    talk = {"messages": [user("q"), said("a")]}
    assert f"{column!r} is {refuses!r}, which cannot be done for a whole row" in refused(read, [{**talk, column: refuses}])
    assert read([{**talk, column: reads}]) == read([{**talk, column: refuses}], ignore=[column]) == [TALK]


@pytest.mark.parametrize(("column", "value"), [("weight", 0.5), ("weight", 0), ("train", False), ("ignore_loss", True)])
def test_they_say_so_of_rows_of_tokens_too(column, value):
    row = {"input_ids": [70, 71, 72], "labels": [-100, 71, 72]}
    assert f"{column!r} is {value!r}, which cannot be done for a whole row" in refused(read, [{**row, column: value}])
    assert read([{**row, column: value}], ignore=[column]) == read([row]) == read([{**row, "weight": 1, "loss": 2.31}])


@pytest.mark.parametrize("column", ["system_msg", "system_instruction", "systemPrompt"])
def test_system_messages_have_other_columns_too(column):
    brief = turn("system", "Be brief.") + turn("user", "q") + OPENS
    assert read([{"messages": [user("q"), said("a")], column: "Be brief."}]) == [brief + "⟦a<|im_end|>⟧"]
    assert asked([{"prompt": "q", column: "Be brief."}]) == [brief]


def test_thoughts_in_a_column_beside_a_conversation_are_refused():
    sharegpt = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    for row in ({"messages": [user("q"), said("a")]}, {"conversations": sharegpt}):
        problem = refused(read, [{**row, "reasoning": "add two"}])
        assert "'reasoning' has what was thought and no message has it: give it to the assistant's message as" in problem
        for switch in ("on", "off", "high", "", None):
            assert read([{**row, "reasoning": switch}]) == [TALK]
    assert read([{"messages": [user("q"), said("<think>add two</think>a")], "reasoning": "add two"}])
    assert read([{"prompt": "q", "completion": "a", "reasoning": "on"}]) == [TALK]


def test_tools_without_a_wrapper_are_written_as_those_with_one():
    plain = {"name": "boil", "description": "boils", "parameters": {"type": "object", "properties": {}}}
    wrapped = {"type": "function", "function": plain}
    expected = read([{"messages": [user("q"), said("a")], "tools": [wrapped]}], template=QWEN)
    for tools in ([plain], [{"type": "function", **plain}], json.dumps([plain]), [json.dumps(plain)]):
        assert read([{"messages": [user("q"), said("a")], "tools": tools}], template=QWEN) == expected
        assert asked([{"prompt": "q", "tools": tools}], template=QWEN)[0] == expected[0].partition("⟦")[0]
    assert "data.ignore tools leaves those of rows unread" in refused(
        read, [{"messages": [user("q"), said("a")], "tools": [plain]}]
    )


# --- data sets whose columns have other names ---------------------------------------------------------------


def test_a_conversation_in_another_column_is_found():
    for talk, form in (
        ([user("q"), said("a")], "messages"),
        ([{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "sharegpt"),
    ):
        rows = [{"conversation_id": "1", "conversation": talk, "language": "English"}]
        assert f"'conversation' has conversations: set --data.format {form} --data.prompt-key conversation" in refused(
            read, rows
        )
        assert read(rows, format=form, prompt_key="conversation") == [TALK]


def test_the_question_of_a_pair_is_found():
    row = {"system": "Be brief.", "question": "q", "chosen": "a", "rejected": "b"}
    assert "or name the column with the prompt, --data.prompt-key question" in refused(read, [row], "preference")
    assert read([row], "preference", prompt_key="question")[0].startswith(turn("system", "Be brief.") + turn("user", "q"))
    assert "or add a column prompt" in refused(read, [{"chosen": "a", "rejected": "b"}], "preference")


def test_a_transcript_is_no_prompt_of_a_chat():
    row = {"prompt": "\n\nHuman: q\n\nAssistant:", "chosen": " a", "rejected": " b"}
    problem = "the prompt is a transcript, from 'Human:' to 'Assistant:': set data.template to none"
    assert problem in refused(read, [row], "preference")
    assert problem in refused(asked, [{"prompt": row["prompt"]}])
    assert read([row], "preference", template_of="none")[0] == "\n\nHuman: q\n\nAssistant:⟦ a<|im_end|>⟧"
    assert asked([{"prompt": row["prompt"]}], template_of="none") == [row["prompt"]]
    whole = {**row, **{name: row["prompt"] + row[name] for name in ("chosen", "rejected")}}
    assert read([whole], "preference", template_of="none") == read([row], "preference", template_of="none")


def test_judged_answers_are_no_prompts_whatever_the_file(write):
    assert "this is unpaired data" in refused(asked, [{"prompt": "q", "completion": "a", "label": True}])
    assert "this is unpaired data" in refused(asked, write("a.csv", "prompt,completion,label\nq,a,True\n"))
    assert asked(write("b.csv", "prompt,completion,label\nq,a,7\n"))


def test_more_of_an_instruction_must_be_a_text(write):
    row = {"instruction": "Add.", "input": {"a": 2}, "output": "5"}
    for how in (read, asked):
        assert "'input' must be a text" in refused(how, write("a.jsonl", lines(row)))


def test_a_folder_of_saved_data_sets_names_them(tmp_path):
    table = datasets.Dataset.from_list([{"prompt": "q", "completion": "a"}])
    table.select([]).save_to_disk(tmp_path / "b")
    table.save_to_disk(tmp_path / "a")
    assert f"{tmp_path} has data sets that were saved in folders: give each of them, such as {tmp_path}/" in refused(
        read, str(tmp_path)
    )
    assert read(str(tmp_path / "a")) == [TALK]


def test_what_is_empty_says_nothing():
    assert read([{"messages": [user("q"), said("a")], "images": [None], "tools": [], "history": [None]}]) == [TALK]
    result = {"role": "tool", "content": {"degrees": 3}}
    problem = refused(read, [{"messages": [user("q"), said("b"), result, said("a")]}])
    assert "must have a text as content, not dict: write it as a text, as by json.dumps" in problem
