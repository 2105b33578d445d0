"""Rows in the shapes of public data sets: who speaks, and what stands beside a conversation, is honoured or refused by name."""

import json

import datasets
import pytest
from rlhf_authoring.models import TOOLS_TEMPLATE as QWEN

from .conftest import CHATML
from .habits import FOR
from .reading import HELPFUL, NARROW, OPENS, THINKS, asked, lines, read, refused, said, turn, user

# --- nulls of tables, arguments as texts ---------------------------------------------------------------


def a_tool(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": f"does {name}", "parameters": parameters}}


TOOLS = [a_tool("boil", litres={"type": "number"}), a_tool("tram", stop={"type": "string", "enum": ["Mill", "Quay"]})]


def calling(name, arguments, result, **more):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    messages = [user("please"), said("", tool_calls=[call]), {"role": "tool", "name": name, "content": result}, said("done")]
    return {"messages": messages, "tools": TOOLS, **more}


CALLS = [
    calling("boil", {"litres": 2}, "hot"),
    calling("tram", {"stop": "Quay", "via": [{"line": "7"}, {"line": "9", "night": True}]}, "9:05"),
    {"messages": [user("hi"), said("hello")], "tools": None},
]


@pytest.fixture(params=["parquet", "arrow", "saved", "dataset", "parquet of JSON", "directory"])
def as_table(request, tmp_path):
    """Rows as a table of Arrow, which fills mappings with nulls."""

    def make(rows):
        how = "use_json" if request.param == "parquet of JSON" else None
        table, path = datasets.Dataset.from_list(rows, on_mixed_types=how), tmp_path / f"table.{request.param.split()[0]}"
        if request.param.startswith("parquet"):
            table.to_parquet(path)
        elif request.param == "directory":
            path.mkdir()
            table.to_parquet(path / "train.parquet")
        elif request.param == "arrow":
            table.save_to_disk(tmp_path / "saved")
            path = next((tmp_path / "saved").glob("*.arrow"))
        elif request.param == "saved":
            table.save_to_disk(path)
        return table if request.param == "dataset" else str(path)

    return make


def test_lines_and_tables_of_the_same_rows_give_the_same_tokens(write, as_table):
    from_lines = read(write("rows.jsonl", lines(*CALLS)), template=QWEN)
    assert read(as_table(CALLS), template=QWEN) == from_lines
    assert '⟦\n<tool_call>\n{"name": "boil", "arguments": {"litres": 2}}\n</tool_call><|im_end|>⟧' in from_lines[0]
    assert (
        '{"name": "tram", "arguments": {"stop": "Quay", "via": [{"line": "7"}, {"line": "9", "night": true}]}}' in from_lines[1]
    )
    assert "null" not in "".join(from_lines)


def test_what_is_null_in_lines_of_json_or_kept_as_json_stays(write):
    row = calling("boil", {"litres": None, "how": [None]}, "hot")
    assert '"arguments": {"litres": null, "how": [null]}' in read(write("a.jsonl", lines(row)), template=QWEN)[0]
    kept = datasets.Dataset.from_list(
        [calling("boil", {"litres": "two"}, "hot"), row, calling("boil", {"litres": 3}, "hot")], on_mixed_types="use_json"
    )
    assert '"arguments": {"litres": null, "how": [null]}' in read(kept, template=QWEN)[1]


def test_arguments_as_json_are_the_same_tokens_as_mappings(write):
    texts = [
        calling("boil", '{"litres":2}', "hot"),
        calling("tram", json.dumps({"stop": "Quay", "via": [{"line": "7"}, {"line": "9", "night": True}]}), "9:05"),
        CALLS[2],
    ]
    assert read(texts, template=QWEN) == read(CALLS, template=QWEN)
    as_text = QWEN.replace("call.function.arguments | tojson", "call.function.arguments")
    assert read(texts, template=as_text) == read(CALLS, template=as_text) == read(CALLS, template=QWEN)
    for arguments in ("litres=2", "[2]", [2], 2):
        problem = refused(read, [calling("boil", arguments, "hot")], template=QWEN)
        assert "message 2 (assistant): the arguments of 'boil' are no JSON object" in problem


def test_calls_of_older_forms_are_calls():
    call = {"name": "boil", "arguments": '{"litres": 2}'}
    older = [user("please"), {"role": "assistant", "content": None, "function_call": call}]
    expected = '<tool_call>\n{"name": "boil", "arguments": {"litres": 2}}\n</tool_call><|im_end|>⟧'
    for messages in (older, [user("please"), said("", tool_calls=[call])]):
        for name, tools in (("functions", [TOOLS[0]["function"]]), ("tools", json.dumps(TOOLS[:1]))):
            (text,) = read([{"messages": messages, name: tools}], template=QWEN)
            assert text.startswith(f"<|im_start|>system{json.dumps(TOOLS[0])}<|im_end|>")
            assert text.endswith("⟦\n" + expected)
    (text,) = read([{"messages": [user("please"), said("I do.", function_call=call)]}], template=QWEN)
    assert text.endswith("⟦\nI do." + expected)
    problem = refused(read, [{"messages": [user("please"), said("I do.", function_call=call)]}])
    assert "leaves out a call of message 2 (assistant)" in problem


# --- what a template leaves out ------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["developer", "system", "function", "ipython", "tool"])
def test_a_message_that_the_template_does_not_write_is_an_error_of_the_row(role):
    odd = {"role": role, "content": "SECRET"}
    talk = [odd, user("x")] if role in ("developer", "system") else [user("y"), said("z"), odd, user("x")]
    number = talk.index(odd) + 1
    assert turn(role, "SECRET") in read([{"messages": [*talk, said("y")]}])[0]
    assert turn(role, "SECRET") in asked([{"prompt": talk}])[0]
    for problem in (
        refused(read, [{"messages": [*talk, said("y")]}], template=NARROW),
        refused(read, [{"prompt": talk, "chosen": "y", "rejected": "n"}], "preference", template=NARROW),
        refused(asked, [{"prompt": talk}], template=NARROW),
    ):
        assert problem.startswith(f"data[0]: the chat template leaves out message {number} ({role}): ")
        assert problem.endswith("(data.on_bad_row skip leaves such rows out)")


def test_a_system_prompt_that_the_template_does_not_write_is_an_error():
    for row, how in (({"prompt": "x", "completion": "y"}, read), ({"prompt": "x"}, asked)):
        assert "leaves out message 1 (system)" in refused(how, [row], template=NARROW, system_prompt="SECRET")
        assert "leaves out message 1 (system)" in refused(how, [{**row, "system_prompt": "SECRET"}], template=NARROW)
        assert how([row], template=NARROW)


def test_words_of_another_role_are_not_written_as_the_assistants():
    template = (
        FOR + "{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] }}{% else %}"
        "{{ '<|assistant|>' + message['content'] + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    assert read([{"messages": [user("x"), said("y")]}], template=template)
    problem = refused(read, [{"messages": [{"role": "developer", "content": "D"}, user("x"), said("y")]}], template=template)
    assert "writes messages of the role 'developer' as the assistant's" in problem


THOUGHT = turn("user", "2+2") + OPENS + "⟦<think>add two</think>4<|im_end|>⟧"


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content", "thinking", "thought", "reasoning_text"])
def test_thoughts_are_trained_under_any_name_or_refused(key):
    rows = [{"messages": [user("2+2"), said("4", **{key: "add two"})]}]
    assert read(rows, template=THINKS) == [HELPFUL + THOUGHT]
    assert "leaves out the reasoning of message 2 (assistant): write it into the content" in refused(read, rows)
    assert read(rows, ignore=[key]) == [HELPFUL + turn("user", "2+2") + OPENS + "⟦4<|im_end|>⟧"]
    pair = {"prompt": "2+2", "chosen": [said("4", **{key: "add two"})], "rejected": [said("5")]}
    assert "leaves out the reasoning" in refused(read, [pair], "preference")


def test_thoughts_of_earlier_turns_need_a_template_that_writes_them_when_they_are_the_last():
    forgets = THINKS.replace("if message['reasoning_content'] else", "if message['reasoning_content'] and loop.last else")
    talk = [user("2+2"), said("4", reasoning="add two"), user("3+3"), said("6")]
    first, last = read([{"messages": talk}], template=forgets)
    assert first == HELPFUL + THOUGHT
    assert last.endswith(turn("assistant", "4") + turn("user", "3+3") + OPENS + "⟦6<|im_end|>⟧")
    assert "leaves out the reasoning of message 2" in refused(asked, [{"prompt": talk[:3]}])
    assert asked([{"prompt": talk[:3]}], template=forgets)


def test_thoughts_that_the_content_has_too_are_not_written_twice():
    rows = [{"messages": [user("2+2"), said("<think>add two</think>4", reasoning="add two")]}]
    for template in (CHATML, THINKS):
        assert read(rows, template=template) == [HELPFUL + THOUGHT]
    other = {"messages": [user("2+2"), said("4", reasoning="add two", thinking="count")]}
    assert "'reasoning' and 'thinking' differ" in refused(read, [other], template=THINKS)


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content", "thinking"])
def test_thoughts_beside_an_answer_that_is_a_text_are_refused(key):
    for row in ({"prompt": "2+2", "completion": "4"}, {"instruction": "2+2", "output": "4"}):
        assert f"'{key}' has what was thought before an answer that is a text" in refused(
            read, [{**row, key: "add two"}], template=THINKS
        )
        assert read([{**row, key: "add two"}], ignore=[key])


@pytest.mark.parametrize("key", ["role", "from", "speaker"])
def test_a_text_of_somebody_is_no_text(key):
    assert f"'{key}' names a speaker" in refused(read, [{"text": "Hi there.", key: "prompter"}])


def test_names_of_people_are_written_or_refused():
    rows = [{"messages": [user("hi", name="Ann"), said("hello")]}]
    assert "leaves out the 'name' of message 1 (user): write it into the content" in refused(read, rows)
    named = CHATML.replace(
        "message['role'] + '\n'", "message['role'] + (' ' + message['name'] if message['name'] else '') + '\n'"
    )
    assert "<|im_start|>user Ann\nhi" in read(rows, template=named)[0]
    assert "Ann" not in read(rows, ignore=["name"])[0]


# --- system messages, and what else stands beside a conversation -----------------------------------------

BRIEF = turn("system", "Be brief.")
BESIDE = [
    ("prompt_completion", {"messages": [user("q"), said("a")]}),
    ("prompt_completion", {"prompt": "q", "completion": "a"}),
    ("prompt_completion", {"prompt": [user("q")], "completion": [said("a")]}),
    ("prompt_completion", {"prompt": "q", "completion": "a", "reward": 1.0}),
    ("prompt_completion", {"instruction": "q", "output": "a"}),
    ("prompt_completion", {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}),
    ("preference", {"prompt": "q", "chosen": "a", "rejected": "b"}),
    ("preference", {"chosen": [user("q"), said("a")], "rejected": [user("q"), said("b")]}),
    (
        "preference",
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
    ),
    ("unpaired", {"prompt": "q", "completion": "a", "label": True}),
    ("unpaired", {"messages": [user("q"), said("a")], "kto_tag": True}),
    ("stepwise", {"prompt": "q", "completions": ["a"], "labels": [True]}),
]


@pytest.mark.parametrize("column", ["system", "system_prompt", "system_message"])
@pytest.mark.parametrize(("kind", "row"), BESIDE, ids=[f"{kind}-{'-'.join(row)}" for kind, row in BESIDE])
def test_a_system_column_is_in_every_prompt(kind, row, column):
    for text in read([{**row, column: "Be brief."}], kind):
        assert text.startswith(BRIEF + turn("user", "q") + OPENS + ("a" if kind == "stepwise" else "⟦"))
    assert read([{**row, column: None}], kind) == read([row], kind)
    plain = {"hello": "none"} if "conversations" in row else {}
    if not plain and kind != "stepwise":
        assert read([{**row, column: "Be brief."}], kind, template=None)[0].count("Be brief.") <= 1


def test_a_system_column_is_in_the_prompts_of_a_run_that_samples():
    for prompt in ("q", [user("q")]):
        for column in ("system", "system_prompt"):
            assert asked([{"prompt": prompt, column: "Be brief.", "answer": "4"}]) == [BRIEF + turn("user", "q") + OPENS]
            assert asked([{"prompt": prompt, column: "Be brief."}], template=None) == ["Be brief.\n\nq"]
    assert asked([{"prompt": "q", "system": "Be brief."}], system_prompt="Be long.") == [BRIEF + turn("user", "q") + OPENS]
    alpaca = {"instruction": "q", "output": "a", "system": "Be brief.", "history": [["hi", "hello"]]}
    assert asked([alpaca]) == [BRIEF + turn("user", "hi") + turn("assistant", "hello") + turn("user", "q") + OPENS]


def test_two_system_messages_that_differ_are_refused():
    row = {"messages": [{"role": "system", "content": "Be brief."}, user("q"), said("a")], "system": "Be brief."}
    assert read([row])[0].count("Be brief.") == 1
    assert "have different ones" in refused(read, [{**row, "system": "Be long."}])
    assert "have different ones" in refused(asked, [{"prompt": row["messages"][:2], "system": "Be long."}])
    assert "'system' and 'system_prompt' differ" in refused(read, [{**row, "system_prompt": "Be long."}])
    assert "'system' must be a text, not true or false" in refused(read, [{**row, "system": True}])


def test_a_prompt_beside_whole_conversations_keeps_its_system_message():
    brief = {"role": "system", "content": "Be brief."}
    whole = {"chosen": [user("q"), said("a")], "rejected": [user("q"), said("b")]}
    expected = [BRIEF + turn("user", "q") + OPENS + f"⟦{each}<|im_end|>⟧" for each in "ab"]
    assert read([{"prompt": [brief, user("q")], **whole}], "preference") == expected
    assert read([{"prompt": [brief, user("q")], "chosen": [said("a")], "rejected": [said("b")]}], "preference") == expected
    assert read([{"messages": [brief, user("q")], "chosen": said("a"), "rejected": said("b")}], "preference") == expected
    assert read([{"prompt": [brief, user("q")], "completion": [user("q"), said("a")]}]) == expected[:1]
    assert read([{"prompt": "q", **whole}], "preference") == [HELPFUL + text.removeprefix(BRIEF) for text in expected]
    for prompt in ("another", [user("another")]):
        problem = refused(read, [{"prompt": prompt, **whole}], "preference")
        assert (
            "'prompt' is none of the messages that 'chosen' begins with" in problem or "does not go on from 'prompt'" in problem
        )
    assert read([{"prompt": "another", **whole}], "preference", ignore=["prompt"])


def test_the_template_is_told_what_the_row_says_to_it():
    asks = (
        CHATML + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}no thoughts\n{% endif %}"
    )
    told = {"enable_thinking": False, "custom_instructions": ""}
    talk = {"prompt": "q", "completion": "a"}
    for column in ({"chat_template_kwargs": told}, {"chat_template_kwargs": json.dumps(told)}, {"enable_thinking": False}):
        assert read([{**talk, **column}], template=asks)[0].endswith(OPENS + "no thoughts\n⟦a<|im_end|>⟧")
        assert asked([{"prompt": "q", **column}], template=asks)[0].endswith(OPENS + "no thoughts\n")
        for how, row in ((read, talk), (asked, {"prompt": "q"})):
            assert "the tokenizer's chat template does not read enable_thinking" in refused(how, [{**row, **column}])
            assert how([{**row, **column}], ignore=list(column))
            assert how([{**row, **column}], ignore=["enable_thinking"])
            assert refused(how, [{**row, **column}], template=None)
    told = {"chat_template_kwargs": {"enable_thinking": True}}
    assert read([{**talk, **told}], template=asks, template_kwargs=["enable_thinking=false"])[0].endswith(
        OPENS + "⟦a<|im_end|>⟧"
    )


def test_tools_of_a_row_are_in_the_prompts_of_a_run_that_samples():
    for tools in (TOOLS, json.dumps(TOOLS), [json.dumps(tool) for tool in TOOLS]):
        assert asked([{"prompt": "q", "tools": tools}], template=QWEN)[0].startswith(
            f"<|im_start|>system{json.dumps(TOOLS[0])}"
        )
        assert "leaves out tools" in refused(asked, [{"prompt": "q", "tools": tools}])
        assert "plain text has no tools" in refused(asked, [{"prompt": "q", "tools": tools}], template=None)
    for tools in ("{", "7", [7], [{}]):
        assert "'tools' " in refused(read, [{"messages": [user("q"), said("a")], "tools": tools}], template=QWEN)


@pytest.mark.parametrize(
    "row", [{"text": "Once."}, {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"}]
)
def test_texts_that_are_taken_as_they_are_refuse_what_stands_beside_them(row):
    kind = "preference" if "chosen" in row else "prompt_completion"
    for beside in ({"system": "Be brief."}, {"tools": TOOLS}, {"chat_template_kwargs": {"a": 1}}):
        assert f"{next(iter(beside))} cannot be added" in refused(read, [{**row, **beside}], kind)
    assert read([{**row, "system": ""}], kind)


@pytest.mark.parametrize("column", ["videos", "audio", "multi_modal_data"])
def test_sounds_and_videos_are_refused_by_name(column):
    for how, row in ((read, {"messages": [user("q"), said("a")]}), (asked, {"prompt": "q"})):
        assert f"'{column}': texts and pictures are read (data.ignore {column} leaves it unread)" in refused(
            how, [{**row, column: ["a.mp4"]}]
        )
        assert how([{**row, column: []}]) == how([row])


@pytest.mark.parametrize("column", ["image", "images"])
def test_a_column_of_pictures_that_are_not_there_names_the_file(column):
    for how, row in ((read, {"messages": [user("q"), said("a")]}), (asked, {"prompt": "q"})):
        assert "a.png: No such file" in refused(how, [{**row, column: ["a.png"]}])
        assert how([{**row, column: []}]) == how([row])


def test_contents_of_parts_are_texts():
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1"}]
    assert read([{"messages": [user(parts), said([{"type": "text", "text": "2"}])]}]) == [
        HELPFUL + turn("user", "1+1") + OPENS + "⟦2<|im_end|>⟧"
    ]
    assert asked([{"prompt": [user(parts)]}]) == [HELPFUL + turn("user", "1+1") + OPENS]
    sharegpt = [{"from": "human", "value": parts}, {"from": "gpt", "value": "2"}]
    assert "⟦2" in read([{"conversations": sharegpt}])[0]
    assert "0 pictures, and 1 place for pictures" in refused(asked, [{"prompt": [user([{"type": "image"}, *parts])]}])
    far = {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}
    said_so = refused(read, [{"messages": [user([far, *parts]), said("2")]}])
    assert "pictures are not fetched from there: --data.fetch-images" in said_so
    for part in (
        {"type": "tool_result", "content": "4"},
        {"type": "thinking", "thinking": "hm", "text": "hm"},
    ):
        problem = f"a message's content has a part of the type {part['type']!r}: texts and pictures are read"
        assert problem in refused(read, [{"messages": [user([part, *parts]), said("2")]}])
        assert problem in refused(asked, [{"prompt": [user([part, *parts])]}])
