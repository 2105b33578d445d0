"""Answers in templates whose prompts, calls and earlier turns differ from conversations: trained whole, or refused by name."""

import time

import pytest
from rlhf_rows.encoding import Encoder
from rlhf_rows.examples import Example
from rlhf_rows.spans import Marker

from .conftest import CHATML, byte_tokenizer
from .habits import FOR
from .reading import HELPFUL, OPENS, asked, read, refused, said, turn, user

EACH = "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
R1 = (  # DeepSeek-R1 and its distilled models: thoughts are opened for prompts, and cut out of every answer
    f"{FOR}{{% if message['role'] == 'assistant' %}}"
    "{{ '<|im_start|>assistant\n' + message['content'].split('</think>')[-1] + '<|im_end|>\n' }}"
    f"{{% else %}}{EACH}{{% endif %}}{{% endfor %}}{ASKS}"
)
CUTS = R1.replace("assistant\n<think>\n", "assistant\n")
QWQ = f"{FOR}{EACH}{{% endfor %}}{ASKS}"
CALLS = (
    "{% for tool in tools or [] %}{{ tool | tojson + '\n' }}{% endfor %}" + FOR + "{% if message['tool_calls'] %}"
    "{{ '<|im_start|>assistant\n' + message['content'] }}{% for call in message['tool_calls'] %}"
    "{{ '<|user|>' + call.function.name + '<|assistant|>' + call.function.arguments | tojson + 'STOP' }}"
    "{% endfor %}{{ '\n' }}{% else %}" + EACH + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HERMES = (  # a line break behind a tool's result, but not behind the last one
    FOR + "{% if message['role'] == 'tool' %}{{ '<|im_start|>tool\n' + message['content'] + ('' if loop.last else '\n') }}"
    "{{ '<|im_end|>' }}{% elif message['tool_calls'] %}{{ '<|im_start|>assistant\n' }}{% for call in message['tool_calls'] %}"
    "{{ call.function.name + call.function.arguments | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% else %}"
    + EACH
    + "{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL = (  # the system message is written into the last question, if nothing follows
    "{% set first = messages[0] %}" + FOR + "{% if message['role'] == 'user' %}"
    "{{ '<|user|>' + (first['content'] + '\n\n' if loop.last and first['role'] == 'system' else '') + message['content'] }}"
    "{{ '<|assistant|>' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
THOUGHT = "<think>\nadd two\n</think>\n\n4"


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


# --- thoughts that a prompt opens -----------------------------------------------------------------------


@pytest.mark.parametrize("template", [R1, QWQ], ids=["R1", "QwQ"])
@pytest.mark.parametrize("answer", [THOUGHT, "\n" + THOUGHT, THOUGHT + "<|im_end|>\n", "add two\n</think>\n\n4"])
def test_an_answer_goes_on_from_the_thoughts_that_its_prompt_opens(answer, template):
    expected = turn("user", "2+2") + OPENS + "<think>\n⟦add two\n</think>\n\n4<|im_end|>⟧"
    rows = [{"messages": [user("2+2"), said(answer)]}, {"prompt": "2+2", "completion": answer}]
    if answer.startswith("add") and template == QWQ:  # which writes it so in a conversation
        rows.pop(0)
    for row in (*rows, {"instruction": "2+2", "output": answer}):
        assert read([row], template=template) == [expected]
    pair = {"prompt": "2+2", "chosen": answer, "rejected": "<think>\nadd one\n</think>\n\n3"}
    assert read([pair], "preference", template=template)[0] == expected
    assert asked([{"prompt": "2+2"}], template=template)[0] == expected.partition("⟦")[0]


def test_turns_with_thoughts_are_rows_of_their_own_where_the_template_cuts_them_out():
    talk = [user("2+2"), said(THOUGHT), user("3+3"), said("<think>\nadd three\n</think>\n\n6")]
    first = turn("user", "2+2") + OPENS
    assert read([{"messages": talk}], template=R1) == [
        first + "<think>\n⟦add two\n</think>\n\n4<|im_end|>⟧",
        first + "\n\n4<|im_end|>\n" + turn("user", "3+3") + OPENS + "<think>\n⟦add three\n</think>\n\n6<|im_end|>⟧",
    ]
    assert "makes a row of each" in refused(read, [{"messages": talk}], template=R1, history="refuse")


def test_the_first_step_goes_on_from_them_too():
    row = {"prompt": "2+2", "completions": ["<think>\nadd two", "4"], "labels": [1, 1]}
    assert read([row], "stepwise", template=R1) == [turn("user", "2+2") + OPENS + "<think>\nadd two⟦\n⟧4⟦\n⟧"]


@pytest.mark.parametrize("template", [R1, QWQ], ids=["R1", "QwQ"])
def test_an_answer_without_thoughts_closes_the_empty_one_that_its_prompt_opens(template):
    first = turn("user", "2+2") + OPENS
    talk = [user("2+2"), said("I think <b>4</b>"), user("3+3"), said("6")]
    empty = first + "<think>\n⟦\n</think>\n\nI think <b>4</b><|im_end|>⟧"
    assert read([{"messages": talk[:2]}], template=template) == [empty]
    later = first + "I think <b>4</b><|im_end|>\n" + turn("user", "3+3") + OPENS + "<think>\n⟦\n</think>\n\n6<|im_end|>⟧"
    assert read([{"messages": talk}], template=template) == [empty, later]
    assert read([{"prompt": "2+2", "completion": "4"}], template=template) == [first + "<think>\n⟦4<|im_end|>⟧"]


GEMMA = (
    f"{FOR}{EACH}{{% endfor %}}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<|channel>thought\n<channel|>' }}{% endif %}"
)


def test_an_answer_follows_the_empty_thought_that_its_prompt_has_closed():
    first = turn("user", "2+2") + OPENS
    opened = first + "<|channel>thought\n"
    for template, expected in (
        (GEMMA, opened + "<channel|>⟦4<|im_end|>⟧"),
        (GEMMA.replace("<channel|>", ""), opened + "⟦<channel|>4<|im_end|>⟧"),
        (QWQ.replace("<think>\n'", "<think>\n\n</think>\n\n'"), first + "<think>\n\n</think>\n\n⟦4<|im_end|>⟧"),
        (QWQ.replace("<think>\n'", "<think>'"), first + "<think>⟦\n\n</think>\n\n4<|im_end|>⟧"),
    ):
        assert read([{"messages": [user("2+2"), said("4")]}], template=template) == [expected]


def test_an_answer_without_an_opening_that_is_no_thought_is_refused_in_a_conversation():
    answers = QWQ.replace("<think>", "<answer>")
    problem = refused(read, [{"messages": [user("2+2"), said("4")]}], template=answers)
    assert "prompts with '<answer>', and does not write this before the answer of a conversation" in problem
    assert "let the answer begin with it, or give prompt and completion as texts" in problem
    half = [{"messages": [user("2+2"), said("so <think>4")]}]
    assert "prompts with '<think>', and does not" in refused(read, half, template=QWQ)
    assert read([{"prompt": "2+2", "completion": "4"}], template=answers)


MARKERS = (  # GLM: nothing but the next role's marker ends an answer, and the model stops there
    FOR + "{{ ('<|tool|>' if message['role'] == 'tool' else '<|' + message['role'] + '|>') + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ call.function.name + call.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def test_a_turn_that_the_next_role_s_marker_ends_is_trained_with_it():
    tokenizer = byte_tokenizer(MARKERS)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|tool|>"]})
    stops = tokenizer.convert_tokens_to_ids(["<|user|>", "<|tool|>"])
    asks = said("") | {"tool_calls": [call("add", a=2)]}
    talk = [user("2+2"), asks, {"role": "tool", "content": "4"}, said("four"), user("so"), said("yes")]
    for last, expected in (
        (6, ['add{"a": 2}<|tool|>', "four<|user|>", "yes<|user|>"]),
        (2, ['add{"a": 2}<|tool|>']),
        (4, ['add{"a": 2}<|tool|>', "four<|user|>"]),
    ):
        assert spans(tokenizer, talk[:last], stops) == expected
    assert spans(tokenizer, [user("2+2"), said("4"), said("or 5")], stops) == ["4", "or 5<|user|>"]
    # A model that does not stop there is trained to end as it does.
    assert spans(tokenizer, [*talk[:1], said("4")], ()) == ["4<|im_end|>"]
    (units,) = Marker(tokenizer, stop_ids=stops).mark(Example("2+2", ("4",)))
    assert tokenizer.decode([units[0].end]) == "<|user|>"


def spans(tokenizer, messages, stops):
    texts = [text for texts in Marker(tokenizer, stop_ids=stops).mark(Example([], (messages,))) for text in texts]
    rows = Encoder(tokenizer).encode(texts)
    return [tokenizer.decode(list(row.completion_ids[begin:end])) for row in rows for begin, end in row.trained]


def test_a_tag_that_the_question_ends_with_is_no_opening():
    bare = f"{FOR}{{{{ message['content'] + '\n' }}}}{{% endfor %}}"
    row = {"prompt": "2+2 in <answer>", "completion": "<answer>4</answer>"}
    assert read([row], template=bare) == ["2+2 in <answer>\n⟦<answer>4</answer><|im_end|>⟧"]


def test_many_tags_take_no_time():
    page = "<td></td>" * 20_000
    begin = time.process_time()
    assert read([{"prompt": page + "?", "completion": "<b>4</b>"}, {"prompt": page, "completion": "<b>4</b>"}], template=R1)
    assert time.process_time() - begin < 10  # of which nearly all is the tokenizer's


def test_thoughts_behind_thoughts_that_the_prompt_has_closed_are_refused():
    closes = QWQ.replace("<think>\n'", "<think>\n\n</think>\n\n'")
    assert "an answer begins with '<think>', and the chat template's prompt has closed that already" in refused(
        read, [{"prompt": "2+2", "completion": THOUGHT}], template=closes
    )
    for answer in ("4", "<think>\n\n</think>\n\n4"):
        assert read([{"prompt": "2+2", "completion": answer}], template=closes)[0].endswith("</think>\n\n⟦4<|im_end|>⟧")


# --- words that a template cuts out ----------------------------------------------------------------------


def test_thoughts_that_a_template_cuts_out_of_contents_are_not_lost_in_silence():
    rows = [{"messages": [user("2+2"), said(THOUGHT)]}]
    problem = refused(read, rows, template=CUTS)
    assert "leaves out or changes words of message 2 (assistant), such as 'add two': give prompt and completion as" in problem
    assert read([{"prompt": "2+2", "completion": THOUGHT}], template=CUTS)[0].endswith(OPENS + f"⟦{THOUGHT}<|im_end|>⟧")
    assert read([{"messages": [user("2+2"), said(THOUGHT, train=False), user("3+3"), said("6")]}], template=CUTS)


def test_words_of_questions_that_a_template_cuts_out_are_not_either():
    cuts = CHATML.replace("message['content'] +", "message['content'].split('###')[0] +")
    for how, row in ((read, {"messages": [user("q ### SECRET"), said("a")]}), (asked, {"prompt": "q ### SECRET"})):
        assert "words of message 1 (user), such as 'q ### SECRET': take them out" in refused(how, [row], template=cuts)
    assert "such as 'a ### b'" in refused(read, [{"messages": [user("q"), said("a ### b")]}], template=cuts)


RICH = '  Look\n\n\n```python\n\tif a < b and "c" != \'d\':  # é 你好\r\n\t\tprint("\\n")\n```\n<b>&amp;</b> {{ x }}  \n'


@pytest.mark.parametrize(
    "form",
    [
        "message['content']",
        "message['content'] | trim",
        "message['content'] | tojson",
        "message['content'].split() | join(' ')",
    ],
)
def test_spaces_and_json_are_no_changes_of_words(form):
    template = CHATML.replace("message['content'] +", f"({form}) +")
    assert read([{"messages": [user(RICH), said(RICH)]}], template=template)
    assert asked([{"prompt": RICH}], template=template)


# --- calls ----------------------------------------------------------------------------------------------


def test_a_call_is_trained_to_its_end_whatever_tokens_are_in_it():
    text = turn("user", "please") + OPENS
    tools = [{"type": "function", "function": {"name": "boil"}}]
    for arguments, written in (({"litres": 2}, '{"litres": 2}'), ({"say": "a<|im_end|>b"}, '{"say": "a<|im_end|>b"}')):
        row = {"messages": [user("please"), said("", tool_calls=[call("boil", **arguments)])]}
        assert read([row], template=CALLS) == [text + f"⟦<|user|>boil<|assistant|>{written}STOP\n<|im_end|>⟧"]
        row["tools"], row["messages"] = tools, [*row["messages"], {"role": "tool", "content": "hot"}, said("done")]
        (whole,) = read([row], template=CALLS)
        assert f"⟦<|user|>boil<|assistant|>{written}STOP\n⟧<|im_start|>tool" in whole
        assert whole.endswith("⟦done<|im_end|>⟧")
    ends = CALLS.replace("STOP", "<s>")  # a special token that ends calls, and that nothing else names
    (whole,) = read([{"messages": [user("please"), said("", tool_calls=[call("boil", litres=2)])]}], template=ends)
    assert whole.startswith(text + '⟦<|user|>boil<|assistant|>{"litres": 2}<s>')


def test_an_answer_to_a_result_that_is_written_otherwise_in_a_prompt_is_trained():
    talk = [user("please"), said("", tool_calls=[call("boil", litres=2)]), {"role": "tool", "content": "hot"}, said("done")]
    prompt = turn("user", "please") + OPENS + '⟦boil{"litres": 2}<|im_end|>⟧\n<|im_start|>tool\nhot<|im_end|>'
    assert read([{"messages": talk}], template=HERMES) == [prompt + OPENS + "⟦done<|im_end|>⟧"]
    first, last = read([{"messages": [*talk, user("sure?"), said("done")]}], template=HERMES)
    assert first == prompt.replace("⟦", "").replace("⟧", "") + OPENS + "⟦done<|im_end|>⟧"
    assert last.endswith(
        "<|im_start|>tool\nhot\n<|im_end|>" + turn("assistant", "done") + turn("user", "sure?") + OPENS + "⟦done<|im_end|>⟧"
    )


def test_calls_and_results_without_ids_get_one():
    wants = "{% if message['tool_call_id'] | length != 9 %}{{ raise_exception('no id') }}{% endif %}"
    asks = FOR + "{% if message['role'] == 'tool' %}" + wants + "{{ message['tool_call_id'] }}{% endif %}"
    template = CALLS.replace(FOR, asks).replace("call.function.name +", "call.function.name + call.id +")
    result = {"role": "tool", "content": "hot"}
    (text,) = read(
        [{"messages": [user("please"), said("", tool_calls=[call("boil", litres=2)]), result, said("done")]}], template=template
    )
    assert 'boilcall00000<|assistant|>{"litres": 2}STOP\n⟧call00000' + turn("tool", "hot") in text


def test_words_beside_calls_say_what_to_do():
    silent = CALLS.replace(" + message['content'] }}{% for call", " }}{% for call")
    row = {"messages": [user("please"), said("I do.", tool_calls=[call("boil", litres=2)])]}
    assert "⟦I do.<|user|>boil" in read([row], template=CALLS)[0]
    assert "leaves out the words of message 2 (assistant): they stand beside calls: take them out" in refused(
        read, [row], template=silent
    )
    one = CALLS.replace("in message['tool_calls'] %}", "in message['tool_calls'][:1] %}")
    row = {"messages": [user("please"), said("", tool_calls=[call("boil", litres=2), call("tram", stop="Quay")])]}
    assert "a call of message 2 (assistant): give each call a message of its own" in refused(read, [row], template=one)


def test_words_beside_calls_may_be_left_out_of_earlier_turns_as_thoughts_are():
    last = CALLS.replace(
        "'<|im_start|>assistant\n' + message['content']",
        "'<|im_start|>assistant\n' + (message['content'] if loop.last else '')",
    )
    talk = [
        user("please"),
        said("I do.", tool_calls=[call("boil", litres=2)]),
        {"role": "tool", "content": "hot"},
        said("done"),
    ]
    first, second = read([{"messages": talk}], template=last)
    assert first.startswith(turn("user", "please") + OPENS + "⟦I do.<|user|>boil")
    assert second.endswith("STOP\n" + turn("tool", "hot") + OPENS + "⟦done<|im_end|>⟧")
    assert "I do." not in second


# --- system messages in the last question -----------------------------------------------------------------


def test_a_system_message_that_is_written_for_prompts_alone_is_in_each_prompt():
    talk = [{"role": "system", "content": "SYS"}, user("q"), said("a"), user("r"), said("b")]
    rows = [
        "<|user|>SYS\n\nq<|assistant|>⟦a<|im_end|>⟧",
        "<|user|>q<|assistant|>a<|im_end|><|user|>SYS\n\nr<|assistant|>⟦b<|im_end|>⟧",
    ]
    assert read([{"messages": talk}], template=MISTRAL) == rows
    assert asked([{"prompt": "q", "system": "SYS"}], template=MISTRAL) == [rows[0].partition("⟦")[0]]
    pair = {"prompt": talk[:2], "chosen": [said("a")], "rejected": [said("c")]}
    assert read([pair], "preference", template=MISTRAL)[0] == rows[0]
    thinking = [*talk[:-1], said("b", reasoning="add two")]
    assert "leaves out the reasoning of message 5 (assistant)" in refused(read, [{"messages": thinking}], template=MISTRAL)
    never = MISTRAL.replace("if loop.last and first", "if false and first")
    assert "leaves out message 1 (system): put it into the first user message" in refused(
        read, [{"messages": talk}], template=never
    )


def test_a_template_that_refuses_system_messages_says_where_to_put_them():
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
    for how, row in ((read, {"prompt": "q", "completion": "a"}), (asked, {"prompt": "q"})):
        problem = refused(how, [{**row, "system": "SYS"}], template=strict)
        assert "System role not supported (where it has no system messages, put them into the first user message)" in problem


def test_a_template_for_tools_beside_another_one():
    both = {"default": CHATML, "tool_use": "{{ tools[0].function.name }}" + CALLS}
    plain = [{"messages": [user("q"), said("a")]}]
    assert read(plain, template=both) == [HELPFUL + turn("user", "q") + OPENS + "⟦a<|im_end|>⟧"]
    tools = [{"name": "boil"}]
    (text,) = read([{"messages": [user("q"), said("", tool_calls=[call("boil")])], "tools": tools}], template=both)
    assert text.startswith("boil")
    assert "⟦<|user|>boil<|assistant|>{}STOP" in text
