"""Prompts as tokens."""

import pytest

from rlhf_host.data.chat import render_prompt, render_prompts
from rlhf_host.data.templates import apply_template
from rlhf_host.errors import UserError

USER = [{"role": "user", "content": "hi"}]


def test_a_text_becomes_a_user_message_where_the_tokenizer_has_a_chat_template(chatml):
    ids = render_prompt("hi", chatml)
    assert (
        chatml.decode(ids)
        == "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids == render_prompt(USER, chatml)


def test_a_text_stays_a_text_where_it_has_none(plain):
    assert plain.decode(render_prompt("1+1=", plain)) == "1+1="


def test_template_none_leaves_the_chat_template_out(chatml):
    assert chatml.decode(render_prompt("1+1=", chatml, template="none")) == "1+1="


def test_an_own_template_replaces_only_the_prompt(chatml):
    ids = render_prompt("{x}^2", chatml, template="Solve {prompt} and answer in \\boxed{}:")
    assert chatml.decode(ids) == "Solve {x}^2 and answer in \\boxed{}:"


def test_an_own_template_without_a_place_for_the_prompt_is_refused(chatml):
    with pytest.raises(UserError, match=r"has no \{prompt\}"):
        render_prompt("hi", chatml, template="Question: {question}")


def test_a_system_prompt_is_a_message_or_the_first_paragraph(chatml, plain):
    assert chatml.decode(render_prompt("hi", chatml, "Be brief.")).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user"
    )
    assert plain.decode(render_prompt("hi", plain, "Be brief.")) == "Be brief.\n\nhi"


def test_a_prompt_with_its_own_system_message_keeps_it(chatml, plain):
    own = [{"role": "system", "content": "Be long."}, *USER]
    assert chatml.decode(render_prompt(own, chatml, "Be brief.")).startswith(
        "<|im_start|>system\nBe long.<|im_end|>\n<|im_start|>user"
    )
    assert plain.decode(render_prompt(own, plain, "Be brief.")) == "Be long.\n\nhi"


def test_a_conversation_without_a_chat_template_is_refused(plain):
    with pytest.raises(UserError, match="needs a chat template"):
        render_prompt([*USER, {"role": "assistant", "content": "yes?"}, *USER], plain)


def test_there_is_one_beginning_of_sequence_token_however_it_gets_there(make_tokenizer):
    adds, both = make_tokenizer(bos=True), make_tokenizer("<s>{{ messages[0]['content'] }}", bos=True)
    start = adds.bos_token_id
    assert render_prompt("hi", adds).count(start) == 1
    assert render_prompt("hi", adds, template="<s>{prompt}").count(start) == 1
    assert render_prompt("hi", both).count(start) == 1
    assert render_prompt("hi", both) == render_prompt("hi", adds)


def test_a_prompt_does_not_end_with_the_end_of_sequence_token_a_tokenizer_adds(make_tokenizer):
    tokenizer = make_tokenizer(eos_at_end=True)
    assert tokenizer.decode(render_prompt("hi", tokenizer)) == "hi"


def test_what_a_chat_template_refuses_is_a_message_not_a_traceback(make_tokenizer):
    tokenizer = make_tokenizer("{{ raise_exception('System role not supported') if messages[0]['role'] == 'system' }}")
    with pytest.raises(UserError, match="roles system, user: System role not supported"):
        render_prompt("hi", tokenizer, "Be brief.")


def test_pictures_in_a_template_for_texts_are_named(make_tokenizer):
    tokenizer = make_tokenizer("{% for message in messages %}{{ 'a ' + message['content'] }}{% endfor %}")
    seen = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]
    with pytest.raises(UserError, match="it has no place for pictures: take a model that sees"):
        apply_template(tokenizer, seen, add_generation_prompt=True)


def test_a_chat_template_that_loops_is_stopped(make_tokenizer, monkeypatch):
    monkeypatch.setattr("rlhf_host.data.templates.TEMPLATE_S", 0.2)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(UserError, match=r"refuses a conversation of roles user: it takes longer than 0\.2 s"):
        render_prompt("2+2=", make_tokenizer(loop))


def test_half_a_character_is_refused_wherever_it_comes_from(plain):
    with pytest.raises(UserError, match="half a character"):
        render_prompt("2+2=", plain, system_prompt="\ud800")


def test_many_prompts_are_rendered_as_one_is(chatml):
    prompts = ["a", USER, "ccc"]
    assert render_prompts(prompts, chatml, "S") == [render_prompt(prompt, chatml, "S") for prompt in prompts]
