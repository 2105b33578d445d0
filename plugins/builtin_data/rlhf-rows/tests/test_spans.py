"""Trained spans over chat templates and tokenizers: exactly what the model itself will write, and its prompt as it is online."""

import random
from itertools import product

import pytest
from rlhf_authoring.models import tiny_tokenizer
from rlhf_rows import encoding
from rlhf_rows.encoding import Encoder
from rlhf_rows.examples import Example
from rlhf_rows.spans import Marker
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlhf_host.data.bad_rows import Malformed
from rlhf_host.data.chat import render_prompt
from rlhf_host.data.messages import UNTRAINED
from rlhf_host.data.row_context import RowContext

from .conftest import CHATML, byte_tokenizer
from .habits import FOR, OPENS_REASONING, OTHER_LAST_END, REASONING, TEMPLATES, TOKENIZERS

USER, MORE = {"role": "user", "content": "Is it so?"}, {"role": "user", "content": "\n and more "}
YES, NO = {"role": "assistant", "content": "Yes,  it is.\n"}, {"role": "assistant", "content": " No: <3"}
TALK = [USER, YES, MORE, NO]


@pytest.fixture(scope="module", params=TOKENIZERS)
def any_tokenizer(request):
    return TOKENIZERS[request.param]()


def rows_of(example, tokenizer, **options):
    units = Marker(tokenizer, **options).mark(example)
    return [tuple(Encoder(tokenizer).encode(unit)) for unit in units]


def one_row(example, tokenizer, **options):
    ((row,),) = rows_of(example, tokenizer, **options)
    assert not isinstance(row, Malformed), row
    return row


def talk(*messages, **beside):
    return Example([], (list(messages),), beside=RowContext(**beside))


def decode(tokenizer, ids):
    return tokenizer.decode(list(ids), skip_special_tokens=False)


def trained(row, tokenizer):
    return [decode(tokenizer, row.completion_ids[begin:end]) for begin, end in row.trained]


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_prompt_of_every_answer_is_the_one_of_online(any_tokenizer, template):
    tokenizer = any_tokenizer
    tokenizer.chat_template = TEMPLATES[template]
    for units in (rows_of(talk(*TALK[:2]), tokenizer), rows_of(talk(*TALK), tokenizer)):
        assert list(units[0][0].prompt_ids) == render_prompt([USER], tokenizer)
    ((last,),) = rows_of(talk(USER, {**YES, UNTRAINED: True}, MORE, NO), tokenizer)
    assert list(last.prompt_ids) == render_prompt(TALK[:3], tokenizer)
    assert last.trained == ((0, len(last.completion_ids)),)


PIECES = {  # where a token of the whole text would reach over the beginning of an answer
    ("byte-level", "headers"),
    ("byte-level, trimmed offsets", "headers"),
    ("whole lines", "llama2"),
    ("whole lines", "no stop"),
    ("metaspace", "no stop"),
}


@pytest.mark.parametrize(("name", "template"), list(product(TOKENIZERS, sorted(set(TEMPLATES) - {"other stop"}))))
def test_in_one_row_what_precedes_a_later_answer_is_the_prompt_of_online(name, template):
    """As one text where its tokens allow that, else as in a rollout: earlier answers keep the tokens they were written with."""
    tokenizer = TOKENIZERS[name]()
    tokenizer.chat_template = TEMPLATES[template]
    row = one_row(talk(*TALK), tokenizer)
    before, prompt = [*row.prompt_ids, *row.completion_ids[: row.trained[1][0]]], render_prompt(TALK[:3], tokenizer)
    assert (before != prompt) == ((name, template) in PIECES)
    assert decode(tokenizer, before) == decode(tokenizer, prompt)
    assert before[-1] == prompt[-1] or template == "no stop"


EXPECTED = {
    "chatml": ["Yes,  it is.\n<|im_end|>", " No: <3<|im_end|>"],
    "llama2": [" Yes,  it is. <|im_end|>", " No: <3 <|im_end|>"],
    "headers": ["Yes,  it is.<|im_end|>", "No: <3<|im_end|>"],
    "no generation prompt": ["<|assistant|>Yes,  it is.\n<|im_end|>", "<|assistant|> No: <3<|im_end|>"],
    "no stop": ["Yes,  it is.\n", " No: <3<|im_end|>"],
}


@pytest.mark.parametrize(("name", "template"), list(product(["bytes", "byte-level", "whole lines", "slow"], EXPECTED)))
def test_each_answer_is_trained_from_its_first_token_through_its_stop_token(name, template):
    tokenizer = TOKENIZERS[name]()
    tokenizer.chat_template = TEMPLATES[template]
    row = one_row(talk(*TALK), tokenizer)
    assert trained(row, tokenizer) == EXPECTED[template]
    whole = tokenizer.apply_chat_template(TALK, tokenize=False)
    end = "" if template != "no stop" else "<|im_end|>"
    text = decode(tokenizer, [*row.prompt_ids, *row.completion_ids])
    assert text == whole[: len(text) - len(end)].rstrip("\n") + end if template == "no stop" else whole.startswith(text)
    assert len(whole) - len(text) <= 1


@pytest.mark.parametrize("template", ["chatml", "llama2", "no generation prompt"])
@pytest.mark.parametrize("name", ["bytes", "byte-level", "byte-level, trimmed offsets", "slow"])
def test_prompt_and_completion_are_the_tokens_of_the_whole_text(name, template):
    tokenizer = TOKENIZERS[name]()
    tokenizer.chat_template = TEMPLATES[template]
    row = one_row(talk(*TALK), tokenizer)
    whole = tokenizer.apply_chat_template(TALK, tokenize=False).removesuffix("\n")
    assert [*row.prompt_ids, *row.completion_ids] == tokenizer.encode(whole, add_special_tokens=False)


def test_a_stop_token_that_pads_too_is_trained(chatml):
    assert chatml.pad_token_id == chatml.eos_token_id
    row = one_row(Example("2+2=", ("4",)), chatml)
    assert row.completion_ids[-1] == chatml.eos_token_id
    assert row.trained == ((0, 2),)
    row = one_row(talk(*TALK), chatml)
    assert [row.completion_ids[end - 1] for _, end in row.trained] == [chatml.eos_token_id] * 2


def test_the_template_s_own_stop_token_ends_an_answer_not_the_tokenizer_s_and_not_both():
    tokenizer = byte_tokenizer(TEMPLATES["other stop"])
    assert trained(one_row(talk(*TALK[:2]), tokenizer), tokenizer) == ["Yes,  it is.\n<|im_start|>"]
    assert trained(one_row(talk(*TALK), tokenizer), tokenizer) == ["Yes,  it is.\n<|im_start|>", " No: <3<|im_start|>"]
    assert trained(one_row(Example("a", ("b",)), tokenizer), tokenizer) == ["b<|im_start|>"]


def test_stop_tokens_of_the_model_end_answers_too(chatml):
    chatml.eos_token = "<s>"
    chatml.chat_template = CHATML.replace("<|im_end|>' + '\n'", "<|user|><|im_end|>\n'")
    assert trained(one_row(talk(USER, YES), chatml), chatml) == ["Yes,  it is.\n<|user|>"]
    end = chatml.convert_tokens_to_ids("<|im_end|>")
    assert trained(one_row(talk(USER, YES), chatml, stop_ids=[end]), chatml) == ["Yes,  it is.\n<|user|><|im_end|>"]


def test_special_tokens_inside_an_answer_do_not_end_it():
    tokenizer = byte_tokenizer(
        FOR + "{{ '<|' + message['role'] + '|>' + message['content'] }}"
        "{% if message['tool_calls'] %}{{ '<|user|>' + message['tool_calls'][0]['function']['name'] }}{% endif %}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add"}}]}
    assert trained(one_row(talk(USER, call), tokenizer), tokenizer) == ["<|user|>add<|im_end|>"]


def test_a_template_that_is_particular_about_roles_shows_its_endings_in_the_rows(chatml):
    chatml.chat_template = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML
    chatml.eos_token = "<s>"
    row = one_row(talk({"role": "system", "content": "S"}, *TALK), chatml)
    assert trained(row, chatml) == ["Yes,  it is.\n<|im_end|>", " No: <3<|im_end|>"]


def test_words_that_look_like_a_stop_token_do_not_end_an_answer(chatml):
    odd = {"role": "assistant", "content": "it writes <|im_end|>\n at the end"}
    assert trained(one_row(talk(USER, odd), chatml), chatml) == ["it writes <|im_end|>\n at the end<|im_end|>"]


def test_messages_that_are_not_trained_are_in_the_row_all_the_same(chatml):
    row = one_row(talk(USER, {**YES, UNTRAINED: True}, MORE, NO), chatml)
    assert trained(row, chatml) == [" No: <3<|im_end|>"]
    assert list(row.prompt_ids) == render_prompt(TALK[:3], chatml)
    row = one_row(talk(USER, YES, MORE, {**NO, UNTRAINED: True}), chatml)
    assert list(row.prompt_ids) == render_prompt([USER], chatml)
    assert trained(row, chatml) == ["Yes,  it is.\n<|im_end|>"]


def test_an_answer_that_begins_the_conversation_is_not_trained(chatml):
    assert trained(one_row(talk(YES, *TALK), chatml), chatml) == EXPECTED["chatml"]
    with pytest.raises(Malformed, match="no message of the assistant is trained"):
        Marker(chatml).mark(talk(YES))


def test_tools_are_in_the_prompt_and_calls_are_trained():
    tokenizer = byte_tokenizer(
        "{% if tools %}{{ tools[0]['name'] + '|' }}{% endif %}"
        + FOR
        + "{{ '<|' + message['role'] + '|>' + message['content'] }}"
        "{% if message['tool_calls'] %}{{ '\ncall ' + message['tool_calls'][0]['function']['name'] }}{% endif %}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add"}}]}
    example = talk(USER, call, {"role": "tool", "content": "4"}, YES, tools=[{"name": "add"}])
    row = one_row(example, tokenizer)
    assert decode(tokenizer, row.prompt_ids) == "add|<|user|>Is it so?<|im_end|><|assistant|>"
    assert trained(row, tokenizer) == ["\ncall add<|im_end|>", "Yes,  it is.\n<|im_end|>"]


@pytest.mark.parametrize(
    ("without", "message"),
    [
        ("{{ tools[0]['name'] + '|' }}", "the chat template leaves out tools: put the tools into the system prompt"),
        ("{{ message['tool_calls'][0]['function']['name'] }}", r"leaves out a call of message 2 \(assistant\)"),
        ("{{ message['content'] }}", r"leaves out message 3 \(tool\)"),
    ],
)
@pytest.mark.parametrize("train_call", [True, False])
def test_tools_calls_and_results_that_a_template_leaves_out_are_an_error(without, message, train_call):
    """Else an empty answer would be trained, or one to nothing."""
    template = (
        "{% if tools %}{{ tools[0]['name'] + '|' }}{% endif %}"
        + FOR
        + "{{ '<|' + message['role'] + '|>' }}{% if message['role'] == 'tool' %}{{ message['content'] }}{% else %}"
        "{{ message.content }}{% endif %}"
        "{% if message['tool_calls'] %}{{ message['tool_calls'][0]['function']['name'] }}{% endif %}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add"}}]}
    call = call if train_call else {**call, UNTRAINED: True}
    example = talk(USER, call, {"role": "tool", "content": '4 "or" 5'}, YES, tools=[{"name": "sum"}])
    assert one_row(example, byte_tokenizer(template))
    assert without in template
    with pytest.raises(Malformed, match=message):
        Marker(byte_tokenizer(template.replace(without, ""))).mark(example)


# --- templates that change earlier turns ---------------------------------------------------------

THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}


def test_turns_that_a_template_changes_become_rows_of_their_own_with_the_prompt_the_model_sees():
    tokenizer = byte_tokenizer(REASONING)
    (first,), (last,) = rows_of(talk(USER, THOUGHT, MORE, NO), tokenizer)
    assert list(first.prompt_ids) == render_prompt([USER], tokenizer)
    assert trained(first, tokenizer) == ["<think>\nhm\n</think>\n\nYes.<|im_end|>"]
    assert list(last.prompt_ids) == render_prompt([USER, THOUGHT, MORE], tokenizer)
    assert "hm" not in decode(tokenizer, last.prompt_ids)
    assert trained(last, tokenizer) == ["<think>\n\n</think>\n\n No: <3<|im_end|>"]


def test_another_end_of_the_last_turn_is_such_a_change():
    tokenizer = byte_tokenizer(OTHER_LAST_END)
    rows = rows_of(talk(*TALK), tokenizer)
    assert [trained(row, tokenizer) for (row,) in rows] == [["Yes,  it is.\n<|im_end|>"], [" No: <3<|im_end|>"]]


def test_such_turns_can_be_refused():
    marker = Marker(byte_tokenizer(REASONING), history="refuse")
    with pytest.raises(
        Malformed, match=r"changes 1 of 2 trained turns once others follow: data\.history rows makes a row of each"
    ):
        marker.mark(talk(USER, THOUGHT, MORE, NO))
    assert len(marker.mark(talk(USER, THOUGHT))) == 1


def test_a_pair_is_two_rows_of_one_prompt(chatml):
    ((chosen, rejected),) = rows_of(Example([USER], ([YES], [NO]), ({"label": 1.0}, {"label": 0.0})), chatml)
    assert list(chosen.prompt_ids) == list(rejected.prompt_ids) == render_prompt([USER], chatml)
    assert (chosen.columns, rejected.columns) == ({"label": 1.0}, {"label": 0.0})
    long = Example([USER], ([YES], [THOUGHT, MORE, NO]), ({}, {}))
    assert len(rows_of(long, chatml)) == 1
    with pytest.raises(Malformed, match="the answers of this pair are not two rows with the same prompt"):
        Marker(byte_tokenizer(REASONING)).mark(long)


def test_an_opening_that_no_answer_has_is_refused_and_texts_are_the_way_out():
    tokenizer = byte_tokenizer(OPENS_REASONING.replace("<think>", "<answer>"))
    with pytest.raises(
        Malformed, match=r"prompts with '<answer>', and does not write this before the answer of a conversation"
    ):
        Marker(tokenizer).mark(talk(USER, YES))
    tokenizer = byte_tokenizer(OPENS_REASONING)
    row = one_row(Example("Is it so?", ("hm</think>Yes.",)), tokenizer)
    assert decode(tokenizer, [*row.prompt_ids, *row.completion_ids]) == (
        "<|user|>Is it so?<|im_end|><|assistant|><think>\nhm</think>Yes.<|im_end|>"
    )


def test_a_missing_space_after_the_opening_is_the_prompt_s():
    tokenizer = byte_tokenizer(
        FOR + "{{ message['role'] + ':' + message['content'] + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    row = one_row(talk(USER, YES), tokenizer)
    assert list(row.prompt_ids) == render_prompt([USER], tokenizer)
    assert trained(row, tokenizer) == ["Yes,  it is.\n<|im_end|>"]


def test_what_a_template_refuses_is_the_row_s_fault():
    tokenizer = byte_tokenizer("{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML)
    with pytest.raises(Malformed, match="refuses a conversation of roles system, user, assistant: no system"):
        Marker(tokenizer, system_prompt="S").mark(talk(USER, YES))


# --- plain texts --------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [None, "none", "Q: {prompt} A:"])
def test_a_completion_is_put_behind_the_prompt_of_online_and_ended(any_tokenizer, template):
    tokenizer = any_tokenizer
    for chat_template in (None, CHATML):
        tokenizer.chat_template = chat_template
        for prompt, completion in product(["Is it", "Is it ", "Is it\n", "Is it \n\n"], [" so", "so ", "\nso", "\n\n so"]):
            row = one_row(Example(prompt, (completion,)), tokenizer, template=template, system_prompt="Be brief.")
            assert list(row.prompt_ids) == render_prompt(prompt, tokenizer, "Be brief.", template)
            assert row.trained == ((0, len(row.completion_ids)),)
            assert list(row.completion_ids).count(tokenizer.eos_token_id) == 1
            assert row.completion_ids[-1] == tokenizer.eos_token_id
            text = decode(tokenizer, row.completion_ids)
            assert "".join(text.split()) == "so<|im_end|>"
            whole = decode(tokenizer, [*row.prompt_ids, *row.completion_ids])
            assert whole == decode(tokenizer, row.prompt_ids) + completion + "<|im_end|>"


def test_a_completion_that_ends_with_the_end_gets_no_second(plain):
    assert decode(plain, one_row(Example("a", ("b<|im_end|>",)), plain).completion_ids) == "b<|im_end|>"


def test_the_tokenizer_s_beginning_is_in_the_prompt_once_and_its_end_is_not(make_tokenizer):
    tokenizer = make_tokenizer(bos=True, eos_at_end=True)
    row = one_row(Example("a", ("b",)), tokenizer)
    assert decode(tokenizer, row.prompt_ids) == "<s>a"
    assert decode(tokenizer, row.completion_ids) == "b<|im_end|>"


def test_the_first_token_of_a_text_is_the_prompt_and_all_others_are_trained(make_tokenizer):
    row = one_row(Example("", ("abc",)), make_tokenizer())
    assert (decode(make_tokenizer(), row.prompt_ids), row.trained) == ("a", ((0, 3),))
    tokenizer = make_tokenizer(CHATML, bos=True)
    row = one_row(Example("", ("abc",)), tokenizer)
    assert decode(tokenizer, row.prompt_ids) == "<s>"
    assert decode(tokenizer, row.completion_ids) == "abc<|im_end|>"


def test_texts_with_turns_of_their_own_stay_out_of_the_chat_template(chatml):
    row = one_row(Example("\n\nHuman: a\n\nAssistant:", (" b",), own_turns=True), chatml)
    assert decode(chatml, row.prompt_ids) == "\n\nHuman: a\n\nAssistant:"
    assert trained(row, chatml) == [" b<|im_end|>"]


def test_one_question_and_answer_need_no_chat_template_but_several_turns_do(plain):
    row = one_row(talk({"role": "system", "content": "S"}, USER, YES), plain)
    assert decode(plain, row.prompt_ids) == "S\n\nIs it so?"
    assert trained(row, plain) == ["Yes,  it is.\n<|im_end|>"]
    for messages in (TALK, [USER, {**YES, UNTRAINED: True}, MORE, NO]):
        with pytest.raises(Malformed, match="needs a chat template"):
            Marker(plain).mark(talk(*messages))


def test_characters_that_the_tokenizer_drops_do_not_move_the_spans():
    tokenizer = tiny_tokenizer()  # knows no capitals
    row = one_row(Example("Hi é=", ("Ökay",)), tokenizer)
    assert decode(tokenizer, row.prompt_ids) == "i ="
    assert decode(tokenizer, row.completion_ids) == "kay<eos>"
    (fault,) = Encoder(tokenizer).encode(Marker(tokenizer).mark(Example("hi", ("É",)))[0])
    assert str(fault) == "the tokenizer has no token for the answer 'É'"


def test_steps_have_their_labels_at_the_separator(plain):
    row = one_row(Example("p", ("onetwo",), steps=(("one", 1.0), ("two", 0.25))), plain)
    assert decode(plain, row.completion_ids) == "one\ntwo\n"
    assert row.trained == ((3, 4), (7, 8))
    assert [row.token_columns["step"][place] for place in (3, 7)] == [1.0, 0.25]
    assert sum(value == value for value in row.token_columns["step"]) == 2


def test_half_a_character_is_the_row_s_fault_and_no_other_s(plain):
    marker, encoder = Marker(plain), Encoder(plain)
    texts = [marker.mark(Example("p", (text,)))[0][0] for text in ("a", "\ud800", "b")]
    first, fault, last = encoder.encode(texts)
    assert str(fault) == "has half a character, '\\ud800': no tokenizer can read it"
    assert (decode(plain, first.completion_ids), decode(plain, last.completion_ids)) == ("a<|im_end|>", "b<|im_end|>")


# --- long prompts ---------------------------------------------------------------------------------------------------------


def trained_tokenizer(kind):
    """Byte pairs learnt from made-up words: in words split by a pattern, in words with their space, or across all text."""
    split = {
        "bytes": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "metaspace": pre_tokenizers.Metaspace(prepend_scheme="always"),
        "anything": None,
    }[kind]
    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    if split is not None:
        inner.pre_tokenizer = split
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" else list("abcdefgh .?\n▁")
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=["<unk>", "<e>"], show_progress=False
    )
    inner.train_from_iterator((words(seed, 60) for seed in range(200)), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<e>", pad_token="<e>")


def words(seed, count):
    draw = random.Random(seed)
    ends = (" ", " ", " ", "  ", ". ", "?\n", "\n\n", " \n ")
    return "".join("".join(draw.choices("abcdefgh", k=draw.randint(1, 6))) + draw.choice(ends) for _ in range(count))


@pytest.mark.parametrize("kind", ["bytes", "metaspace", "anything"])
def test_the_tokens_after_a_long_prompt_are_those_of_the_whole_text(kind, monkeypatch):
    tokenizer = trained_tokenizer(kind)
    texts = [Example(words(n, 20 + n % 40).rstrip(" " * (n % 2)), (words(-n, 5 + n % 9),)) for n in range(1, 120)]
    marked = [text for example in texts for unit in Marker(tokenizer).mark(example) for text in unit]
    short, last_words = [], encoding._last_words
    monkeypatch.setattr(encoding, "_last_words", lambda prompt: short.append(last_words(prompt)) or short[-1])
    fast = Encoder(tokenizer).encode(marked)
    assert sum(begin > 0 for begin in short) > 50
    monkeypatch.setattr(encoding, "_last_words", lambda prompt: 0)
    assert fast == Encoder(tokenizer).encode(marked)
