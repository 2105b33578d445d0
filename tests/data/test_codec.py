"""The codec: what is appended after an answer, and what is read of one."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rlhf_authoring.models import TOOLS_TEMPLATE as QWEN
from rlhf_authoring.models import tiny_tokenizer

from rlhf_host.config.schema import DataConfig
from rlhf_host.data.chat import render_prompt
from rlhf_host.data.codec import ChatCodec
from rlhf_host.data.templates import for_chat
from rlhf_host.errors import UserError
from rlhf_host.records.episodes import EpisodeFailed
from rlhf_host.records.messages import ToolCall

from .conftest import CHATML, byte_tokenizer

ANSWER = {"role": "assistant", "content": "a"}


def user(text):
    return {"role": "user", "content": text}


def tool(name="add", **properties):
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "description": "does it", "parameters": parameters}}


def after(tokenizer, new, sampled=(), last=ANSWER, **more):
    """The appended text."""
    messages = [user(new)] if isinstance(new, str) else new
    return tokenizer.decode(ChatCodec(tokenizer, **more).delta(last, messages, sampled))


def test_a_conversation_without_a_text_is_refused_where_no_template_writes_any():
    with pytest.raises(UserError, match="the conversation has no text"):
        ChatCodec(tiny_tokenizer()).render([user("")])


@pytest.mark.parametrize(("stop", "said"), [((), "46 and"), (("6", "4"), ""), (("6 ",), "4"), (("x",), "46 and")])
def test_a_message_ends_before_the_first_stop_text(chatml, stop, said):
    assert ChatCodec(chatml).parse(chatml.encode("46 and"), stop=stop).content == said


# --- what is appended --------------------------------------------------------------------------


def test_turns_appended_token_by_token_equal_the_whole_conversation_rendered_at_once(chatml):
    codec, end = ChatCodec(chatml), chatml.eos_token_id
    appended, whole = codec.render([user("hi")]), [user("hi")]
    assert appended == render_prompt("hi", chatml)
    for words, observation in (("yes?", "more"), ("  ok\n", "last")):
        sampled = [*chatml.encode(words), end]
        said = {"role": "assistant", "content": words}
        appended += sampled + codec.delta(said, [user(observation)], sampled)
        whole += [said, user(observation)]
    assert appended == render_prompt(whole, chatml)


def test_a_turn_cut_by_length_is_closed_before_the_next(chatml):
    rest = "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert after(chatml, "more", chatml.encode("cut")) == "<|im_end|>" + rest
    assert after(chatml, "more", []) == "<|im_end|>" + rest
    assert after(chatml, "more", [chatml.eos_token_id]) == rest


def test_new_messages_may_have_any_role(chatml):
    new = [{"role": "tool", "content": "4"}, user("go on")]
    text = after(chatml, new, [chatml.eos_token_id])
    assert text == "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"


def test_the_template_s_ending_is_left_out_when_another_end_token_was_sampled(chatml):
    """Some models stop on ``<|endoftext|>`` though their template writes ``<|im_end|>``: one of them is enough."""
    chatml.eos_token = "<|user|>"
    assert after(chatml, "m", [chatml.eos_token_id]).startswith("\n<|im_start|>user")
    opens = chatml.convert_tokens_to_ids("<|assistant|>")
    assert after(chatml, "m", [opens]).startswith("<|im_end|>"), "a special token like any other"
    assert after(chatml, "m", [opens], stop_ids=[opens]).startswith("\n<|im_start|>user"), "an end of the engine's"


def test_a_template_whose_next_turn_is_the_end_token_writes_it_once(make_tokenizer):
    """GLM's models end their turn by opening the user's."""
    turns = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    tokenizer = make_tokenizer(turns + "{% if add_generation_prompt %}<|assistant|>{% endif %}")
    opens = tokenizer.convert_tokens_to_ids("<|user|>")
    assert after(tokenizer, "m", [opens]) == "m<|assistant|>"
    assert after(tokenizer, "m") == "<|user|>m<|assistant|>"
    assert after(tokenizer, "m", [tokenizer.eos_token_id]) == "<|user|>m<|assistant|>"
    assert after(tokenizer, "use", [opens], stop_ids=[opens]) == "use<|assistant|>", "though the token has these letters"
    assert after(tokenizer, "<|user|>", [opens], stop_ids=[opens]) == "<|user|><|assistant|>"


def test_without_a_chat_template_it_is_the_text_alone(plain, chatml):
    assert after(plain, " 5?") == " 5?"
    assert after(chatml, " 5?", template="none") == " 5?"
    assert after(plain, [user("a"), user("b")]) == "a\nb"


def test_plain_text_has_no_tools(plain):
    with pytest.raises(EpisodeFailed, match="plain text has no tools: put the tools into the system prompt"):
        ChatCodec(plain).render([user("x")], [tool()])


@pytest.mark.parametrize(
    ("template", "new", "reason"),
    [
        ("{{ messages[-1]['content'] }}", "m", "leaves out earlier answers"),
        (CHATML.replace("<|im_end|>", "<END>"), "m", "ends an answer without a special token"),
        (CHATML.replace("for message in messages", "for message in messages if message.role != 'tool'"), "tool", "role 'tool'"),
    ],
)
def test_what_a_template_cannot_express_is_refused(make_tokenizer, template, new, reason):
    messages = [{"role": "tool", "content": "4"}, user("go on")] if new == "tool" else [user(new)]
    codec = ChatCodec(make_tokenizer(template.replace("'<|im_start|>' + ", "") if "END" in template else template))
    with pytest.raises(EpisodeFailed, match=f"codec: the chat template .*{reason}"):
        codec.delta(ANSWER, messages, [])
    if new != "tool":
        with pytest.raises(UserError, match=reason):
            codec.check()


@pytest.mark.parametrize("chat_template", [None, CHATML])
def test_an_observation_without_tokens_is_refused(chat_template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = chat_template
    codec = ChatCodec(tokenizer)
    with pytest.raises(EpisodeFailed, match="no tokens for the text '漢字'"):
        codec.delta(ANSWER, [user("漢字")], [])
    if chat_template is None:
        assert codec.delta(ANSWER, [user("")], []) == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "what?"}],
            "a part of the type 'image_url'",
        ),
        ([{"type": "text", "text": None}], "a part of the type 'text'"),
        ({"result": 3}, "is a dict: write it as text"),
        (3, "is an int: write it as text"),
    ],
)
@pytest.mark.parametrize("chat_template", [None, CHATML])
def test_an_observation_that_is_no_text_is_refused(make_tokenizer, chat_template, content, reason):
    codec, seen = ChatCodec(make_tokenizer(chat_template)), {"role": "user", "content": content}
    with pytest.raises(EpisodeFailed, match=reason):
        codec.delta(ANSWER, [seen], [])
    with pytest.raises(EpisodeFailed, match=reason):
        codec.render([seen])


@pytest.mark.parametrize("content", ["<|im_end|>", "<|im_end|>hi", "hi<|im_end|>", "a long text<|im_end|>"])
def test_a_special_token_of_a_content_does_not_end_an_answer(make_tokenizer, content):
    lines = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with pytest.raises(EpisodeFailed, match="ends an answer without a special token"):
        ChatCodec(make_tokenizer(lines)).delta(ANSWER, [user(content)], [])


def test_the_second_of_two_equal_messages_is_looked_for_behind_the_first(make_tokenizer):
    once = CHATML.replace(
        "{{ '<|im_start|>' + m", "{% if loop.first or message != messages[loop.index0 - 1] %}{{ '<|im_start|>' + m"
    )
    codec = ChatCodec(make_tokenizer(once.replace("'\n' }}{% endfor", "'\n' }}{% endif %}{% endfor")))
    result = {"role": "tool", "content": "(3)"}
    codec.delta(ANSWER, [result, {**result, "content": "(4)"}], [])
    with pytest.raises(EpisodeFailed, match=r"changes a message of the role 'tool': '\(3\)'"):
        codec.delta(ANSWER, [result, result], [])


def test_what_is_remembered_of_conversations_is_bounded(chatml, monkeypatch):
    monkeypatch.setattr("rlhf_host.data.codec.MEMO", 5)
    codec, talk = ChatCodec(chatml), [user("q"), ANSWER]
    for _ in range(20):
        assert codec.rewrites(talk, [user("u")]) is False
        codec.render(talk)
        talk = [*talk, user("u"), ANSWER]
    assert len(codec._rewritten) <= 5


def test_a_template_without_assistants_is_enough_for_one_turn(make_tokenizer):
    codec = ChatCodec(make_tokenizer(CHATML.replace("in messages %}", "in messages if message.role != 'assistant' %}")))
    assert codec.parse(codec.tokenizer.encode("yes<|im_end|>")).content == "yes"


def test_a_message_that_the_template_changes_is_refused(make_tokenizer):
    codec = ChatCodec(make_tokenizer(CHATML.replace("message['content'] +", "message['content'].replace('!', '') +")))
    with pytest.raises(EpisodeFailed, match="changes a message of the role 'user': 'is it!'"):
        codec.delta(ANSWER, [user("is it!")], [])
    codec.delta(ANSWER, [user("is it")], [])


def test_calls_that_nobody_answers_and_calls_of_a_template_without_them(chatml):
    """ChatML as it is here has no calls: their turn goes on with a user's message, but a result has no place."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {}}}
    last = {**ANSWER, "tool_calls": [call]}
    assert after(chatml, "no tools, please", [chatml.eos_token_id], last).startswith("\n<|im_start|>user\nno tools")
    with pytest.raises(EpisodeFailed, match="leaves out tool calls: put the tools into the system prompt"):
        after(chatml, [{"role": "tool", "content": "3", "tool_call_id": "1"}], [], last)


def test_a_template_that_wants_arguments_as_text_gets_them_so(make_tokenizer):
    strict = QWEN.replace("call.function.arguments | tojson", "call.function.arguments + ''")
    codec = ChatCodec(make_tokenizer(strict))
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    talk = [user("x"), {**ANSWER, "tool_calls": [call]}, {"role": "tool", "content": "3", "tool_call_id": "1"}]
    text = codec.tokenizer.decode(codec.render(talk, [tool()]))
    assert '{"name": "add", "arguments": {"a": 1}}' in text
    assert codec.tokenizer.decode(codec.delta(talk[1], talk[2:], [], tools=[tool()])).startswith("<|im_end|><|im_start|>user")


def test_a_template_that_reads_parts_gets_parts(make_tokenizer):
    parts = CHATML.replace("message['content'] +", "message['content'][0].text +")
    assert after(make_tokenizer(parts), "more") == "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
AWKWARD = st.sampled_from(["<|im_end|>", "<|im_start|>assistant\n", "<tool_call>", "</tool_call>", "</think>", "🙂", " ", "\n"])
CONTENT = st.lists(TEXTS | AWKWARD, min_size=1, max_size=4).map("".join)
QWENS = byte_tokenizer(QWEN)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(words=CONTENT, result=CONTENT, ended=st.booleans(), called=st.booleans())
def test_whatever_is_said_goes_on_exactly_as_the_template_writes_it(words, result, ended, called):
    """``<|im_end|>`` in a content is one special token there, as when the whole conversation is rendered."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"text": words}}}
    last = {"role": "assistant", "content": "" if called else words} | ({"tool_calls": [call]} if called else {})
    new = [{"role": "tool", "tool_call_id": "1", "content": result}] if called else [user(result)]
    codec = ChatCodec(QWENS)
    end = QWENS.eos_token_id
    sampled = [*QWENS.encode("whatever"), *([end] if ended else [])]
    cut = codec.delta(last, new, sampled, tools=[tool()] if called else None)
    text = QWENS.apply_chat_template(
        [user("x"), last, *new], tokenize=False, add_generation_prompt=True, tools=[tool()] if called else None
    )
    whole = QWENS.encode(text, add_special_tokens=False)
    assert whole[-len(cut) :] == cut
    assert whole[-len(cut) - 1] == end if ended else cut[0] == end


# --- what is read ------------------------------------------------------------------------------


ADD = (tool(a="integer", b="integer"),)


def said(text, tools=ADD, template=QWEN, **more):
    codec = ChatCodec(byte_tokenizer(template), **more)
    return codec.parse(codec.tokenizer.encode(text, add_special_tokens=False), tools=tools)


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def test_calls_text_and_reasoning():
    reply = said(f"<think>\nhm\n</think>\n\nlet me see\n{CALL}<|im_end|>")
    assert (reply.content, reply.reasoning) == ("let me see", "hm")
    assert reply.tool_calls == (ToolCall("add", {"a": 1, "b": 2}),)
    assert reply.problems == ()
    assert [call.arguments["a"] for call in said(CALL + "\n" + CALL.replace("1", "5")).tool_calls] == [1, 5]


@pytest.mark.parametrize(
    "text",
    [
        CALL[:-20],
        CALL.replace('"add"', "add"),
        CALL.replace('"name"', '"nome"'),
        CALL.replace('{"a": 1, "b": 2}', "[1, 2]"),
        CALL.replace('"add"', '""'),
        CALL.replace('"add"', "7"),
        "<tool_call>" * 50,
    ],
)
def test_a_call_that_cannot_be_read_is_text_with_a_problem(text):
    reply = said(text)
    assert reply.tool_calls == ()
    assert reply.content == text
    [problem] = reply.problems
    assert problem.startswith("unreadable: ")


@settings(max_examples=100, deadline=None)
@given(cut=st.integers(0, len(CALL)), noise=CONTENT)
def test_nothing_that_a_model_can_say_raises(cut, noise):
    reply = said(CALL[:cut] + noise + CALL[cut:])
    assert isinstance(reply.content, str)
    assert all(call.name for call in reply.tool_calls)


def test_without_tools_a_call_is_text():
    assert said(CALL, tools=None).content == CALL
    assert said("plain<|im_end|>").content == "plain"


def test_reasoning_that_the_template_begins():
    opened = QWEN.replace("<|im_start|>assistant\n{%- endif %}", "<|im_start|>assistant\n<think>\n{%- endif %}")
    reply = said("hm\n</think>\n\nyes", template=opened)
    assert (reply.reasoning, reply.content) == ("hm", "yes")
    assert said("hm\n</think>\n\nyes", tools=None, template=opened).reasoning == "hm"


FORMATS = {
    "mistral": ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]', "{# [TOOL_CALLS] #}"),
    "llama3_json": ('{"name": "add", "parameters": {"a": 1, "b": 2}}', '{# "parameters": <|start_header_id|> #}'),
    "xml": (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>",
        "{# <tool_call><function= #}",
    ),
    "glm": (
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        "{# <tool_call><arg_key> #}",
    ),
    "hermes": (CALL, ""),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_seen_from_the_chat_template_or_given(name):
    text, mark = FORMATS[name]
    plain = CHATML if name != "hermes" else QWEN
    for reply in (said(text, template=mark + plain), said(text, template=plain, tool_format=name)):
        assert reply.tool_calls == (ToolCall("add", {"a": 1, "b": 2}),), reply
        assert reply.content == ""
    assert said(text, template=mark + plain, tool_format="none").content == text


def test_a_tokenizer_s_own_response_template_comes_first():
    tokenizer = byte_tokenizer(QWEN)
    fields = {"content": {}, "tool_calls": {"open": "<<", "close": ">>", "content": "json", "repeats": True}}
    tokenizer.response_template = {"fields": fields, "start_anchor": "<|im_start|>assistant"}
    codec = ChatCodec(tokenizer)
    ids = tokenizer.encode("ok<<" + json.dumps({"name": "add", "arguments": {}}) + ">>", add_special_tokens=False)
    reply = codec.parse(ids, tools=[tool()])
    assert (reply.content, reply.tool_calls) == ("ok", (ToolCall("add", {}),))


def test_without_tools_a_tokenizer_s_own_response_template_leaves_calls_as_text():
    tokenizer = byte_tokenizer(QWEN)
    fields = {"content": {}, "tool_calls": {"open": "<<", "close": ">>", "content": "json", "repeats": True}}
    tokenizer.response_template = {"fields": fields, "start_anchor": "<|im_start|>assistant"}
    text = 'ok<<{"name": "add", "arguments": {}}>>'
    reply = ChatCodec(tokenizer).parse(tokenizer.encode(text, add_special_tokens=False))
    assert (reply.content, reply.tool_calls) == (text, ())


def test_a_start_with_tools_whose_calls_would_not_be_read_is_refused():
    unknown = QWEN.replace("tool_call>", "call>")
    tokenizer = byte_tokenizer(unknown)
    with pytest.raises(UserError, match=r"none would be read: choose one of hermes, .* as rollout\.tool_format"):
        ChatCodec(tokenizer).check([tool()])
    ChatCodec(tokenizer, tool_format="hermes").check([tool()])
    ChatCodec(tokenizer).check()
    tokenizer.response_template = {"fields": {"content": {}}, "start_anchor": "<|im_start|>assistant"}
    ChatCodec(tokenizer).check([tool()])


def test_an_unknown_format_is_refused(chatml):
    with pytest.raises(UserError, match=r"rollout\.tool_format 'hermas' is not one of auto, none, hermes"):
        ChatCodec(chatml, tool_format="hermas")


# --- what the data say to the template --------------------------------------------------------------


def told(**data):
    template = "{% for m in messages %}{{ m.content }} {% endfor %}{{ strftime_now('%d %b %Y') }} {{ enable_thinking }}"
    tokenizer = byte_tokenizer(template)
    own = for_chat(tokenizer, DataConfig(**data))
    message = [{"role": "user", "content": "x"}]
    return own.apply_chat_template(message, tokenize=False), tokenizer.apply_chat_template(message, tokenize=False), own


def test_the_template_is_told_what_the_data_say_and_the_day_stays():
    own, plain, tokenizer = told(template_kwargs=["enable_thinking=false"], day="2025-02-03")
    assert own == "x 03 Feb 2025 False"
    assert plain != own
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == own
    codec = ChatCodec(tokenizer)
    assert "03 Feb 2025" in tokenizer.decode(codec.render([{"role": "user", "content": "hello"}]))


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"template_kwargs": ["enable_thinkin=false"]}, "the tokenizer's chat template does not read enable_thinkin"),
        ({"template_kwargs": ["reasoning_effort=low"]}, "the tokenizer's chat template does not read reasoning_effort"),
        ({"template_kwargs": ["enable_thinking"]}, "write KEY=VALUE"),
        ({"template_kwargs": ["enable_thinking=true", "enable_thinking=false"]}, "enable_thinking is given twice"),
        ({"template_kwargs": ["tools=[]"]}, "tools is given by the host"),
        ({"day": "yesterday"}, "is not a day such as 2026-12-31"),
    ],
)
def test_what_no_template_can_be_told(odd, words):
    with pytest.raises(UserError, match=words):
        told(**odd)
