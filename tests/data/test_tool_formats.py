"""How calls and reasoning are read, format by format."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_host.data import tool_formats
from rlhf_host.data.codec import ChatCodec
from rlhf_host.data.messages import messages_of
from rlhf_host.records.messages import ToolCall

from .conftest import CHATML, byte_tokenizer

TOKENIZER = byte_tokenizer(CHATML)
PARAMETERS = {"a": {"type": "integer"}, "text": {"type": "string"}, "deep": {"type": "object"}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": PARAMETERS}}}]


def said(text, tool_format, tools=TOOLS):
    codec = ChatCodec(TOKENIZER, tool_format=tool_format)
    return codec.parse(TOKENIZER.encode(text, add_special_tokens=False), tools=tools)


def xml(**arguments):
    given = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in arguments.items())
    return f"<tool_call>\n<function=add>\n{given}</function>\n</tool_call>"


def glm(**arguments):
    given = "".join(f"<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n" for name, value in arguments.items())
    return f"<tool_call>add\n{given}</tool_call>"


def channel(name, text, end="<|end|>"):
    return f"<|channel|>{name}<|message|>{text}{end}"


GPTOSS = channel("analysis", "hm") + '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CALLS = {
    "hermes": HERMES,
    "xml": xml(a=1),
    "glm": glm(a=1),
    "gptoss": GPTOSS,
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]',
    "llama3_json": '{"name": "add", "parameters": {"a": 1}}',
}


def test_every_format_has_a_call_here():
    assert set(CALLS) == set(tool_formats.FORMATS)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_and_its_cuts(name):
    """A call is read whole or stays text, wherever it was cut."""
    whole = CALLS[name]
    assert said(whole, name).tool_calls == (ToolCall("add", {"a": 1}),)
    for cut in range(len(whole)):
        reply = said(whole[:cut], name)
        assert reply.tool_calls in ((), (ToolCall("add", {"a": 1}),)), whole[:cut]
        assert reply.tool_calls or reply.content or reply.reasoning or not whole[:cut].strip(), whole[:cut]


@pytest.mark.parametrize("written", [xml, glm], ids=["xml", "glm"])
def test_the_tool_s_schema_says_the_type_of_an_argument(written):
    """``75001`` is written alike as a number and as a text."""
    [call] = said(written(a=75001, text=75001, deep='{"x": [1]}', other="7"), written.__name__).tool_calls
    assert call.arguments == {"a": 75001, "text": "75001", "deep": {"x": [1]}, "other": "7"}


def test_indented_text_keeps_its_indent():
    [call] = said(xml(text="    return 1\n"), "xml").tool_calls
    assert call.arguments == {"text": "    return 1\n"}


@pytest.mark.parametrize("written", [xml, glm], ids=["xml", "glm"])
def test_a_call_without_its_end_is_no_call_even_where_arguments_were_complete(written):
    """``delete(path, dry_run)`` that was cut before ``dry_run`` must not be called."""
    text = written(text="/tmp", a=1)
    cut = text[: text.index("a>" if written is xml else "a</arg_key>")]
    reply = said(cut, written.__name__)
    assert (reply.tool_calls, reply.content) == ((), cut)
    assert reply.problems == ("unreadable: a call without an end",)


def test_gpt_oss_writes_parts_into_channels():
    reply = said(GPTOSS, "gptoss")
    assert (reply.reasoning, reply.content, reply.problems) == ("hm", "", ())
    final = channel("analysis", "hm") + "<|start|>assistant" + channel("final", "it is 3", "<|return|>")
    for tools in (TOOLS, None):
        reply = said(final, "gptoss", tools)
        assert (reply.reasoning, reply.content, reply.tool_calls) == ("hm", "it is 3", ())
    before = said(channel("commentary", "let me see") + GPTOSS.partition("<|end|>")[2], "gptoss")
    assert (before.content, len(before.tool_calls)) == ("let me see", 1)
    other = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
    assert said(other, "gptoss").tool_calls == (ToolCall("add", {"a": 1}),)
    assert said("no channel at all", "gptoss").content == "no channel at all"


def test_text_on_both_sides_of_a_call_and_thoughts_is_kept():
    reply = said(f"<think>a</think>one {HERMES} two<think>b</think> three", "hermes")
    assert (reply.content, reply.reasoning) == ("one\ntwo\nthree", "a\nb")
    assert reply.tool_calls == (ToolCall("add", {"a": 1}),)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", r'"\ud800"', "1e999"])
def test_arguments_that_no_other_program_reads_are_text(value):
    text = HERMES.replace("1}", value + "}")
    reply = said(text, "hermes")
    assert (reply.tool_calls, reply.content) == ((), text)
    assert reply.problems[0].startswith("unreadable: ")


@pytest.mark.parametrize("text", ["<parameter=a>" * 6000, "</parameter>" + "<parameter=a>" * 6000, "<parameter=a>\n" * 6000])
def test_an_answer_of_openings_does_not_stall(text):
    began = time.perf_counter()
    for end in ("", "</function></tool_call>"):
        said("<tool_call>\n<function=add>\n" + text + end, "xml")
    assert time.perf_counter() - began < 2


TEXT = st.lists(
    st.sampled_from(["<tool_call>", "</tool_call>", "<function=", "add", ">", "<parameter=a>", "</parameter>", "</function>"])
    | st.sampled_from(["<arg_key>", "</arg_key>", "<arg_value>", "[TOOL_CALLS]", '{"name": "add"', "}", "<think>", "</think>"])
    | st.sampled_from(
        ["<|channel|>", "commentary", " to=functions.add", "<|message|>", "<|call|>", "<|end|>", "analysis", "\n"]
    )
    | st.text(max_size=5),
    max_size=12,
).map("".join)


@settings(max_examples=200, deadline=None)
@given(text=TEXT, name=st.sampled_from(sorted(CALLS)), whole=st.booleans())
def test_nothing_that_a_model_can_say_raises_in_any_format(text, name, whole):
    text = text.encode("utf-8", "ignore").decode()
    reply = said(text + CALLS[name] if whole else text, name)
    assert all(isinstance(call.arguments, dict) and call.name for call in reply.tool_calls)
    assert not (reply.problems and reply.tool_calls)


@pytest.mark.parametrize(
    ("content", "results"),
    [
        ('<tool_response>\n{"sum": 5}\n</tool_response>', ['{"sum": 5}']),
        ("<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>\n", ["1", "2"]),
        ("plain", ["plain"]),
        ("it said <tool_response>1</tool_response>", ["it said <tool_response>1</tool_response>"]),
        ("<tool_response>1", ["<tool_response>1"]),
        ("<tool_response>" * 20_000 + "</tool_response>", ["<tool_response>" * 20_000 + "</tool_response>"]),
    ],
)
def test_results_of_tools_are_wrapped_once(content, results):
    """The tags of Hermes in a data set are those that the chat template writes."""
    for message in ({"role": "tool", "content": content}, {"from": "tool", "value": content}):
        assert [each["content"] for each in messages_of([message], "messages")] == results
    said = [{"role": "user", "content": content}]
    assert messages_of(said, "messages") == said, "only a tool's own message"
