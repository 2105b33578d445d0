"""Thoughts at the border of a prompt and its answer: opened once and closed once, or refused with what to do."""

import pytest

from .habits import FOR
from .reading import OPENS, read, refused, said, turn, user

QUESTION = turn("user", "2+2") + OPENS
TALK = [user("2+2"), said("4")]
OWN = [user("2+2"), said("<think>\nadd two\n</think>\n\n4")]
EMPTY = [user("2+2"), said("<think>\n\n</think>\n\n4")]
TOLD = [user("2+2"), said("4", reasoning_content="add two")]


def template(answer: str, opening: str) -> str:
    """A chat template that writes ``answer`` for an answer, and ``opening`` for a prompt, both as Jinja's code."""
    return (
        f"{FOR}{{{{ '<|im_start|>' + message['role'] + '\n' }}}}{{% if message['role'] == 'assistant' %}}{answer}"
        "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        f"{{% if add_generation_prompt %}}{{{{ '<|im_start|>assistant\n' }}}}{opening}{{% endif %}}"
    )


SAYS = "{{ message['content'] }}"
BOTH = "<think>\n" + SAYS, "<think>\n"  # Nemotron Nano 2
CLOSES = "<think></think>" + SAYS, ""  # Kimi K2 Thinking
OFF = "</think>" + SAYS, "{% if enable_thinking %}<think>{% else %}</think>{% endif %}"  # DeepSeek-V4
ON = {"chat_template_kwargs": {"enable_thinking": True}}
CHANNEL = "<|channel>thought\n"
SHUTS = SAYS, "{% if not enable_thinking %}" + CHANNEL + "<channel|>{% endif %}"  # Gemma 4
REASONS = (  # Qwen3
    "{% if message['reasoning_content'] %}<think>\n{{ message['reasoning_content'] }}\n</think>\n\n{% endif %}" + SAYS,
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}",
)
WRAPS = "<answer>" + SAYS + "</answer>\n"  # Command R


@pytest.mark.parametrize(
    ("forms", "talk", "expected"),
    [
        (BOTH, TALK, "<think>\n⟦\n</think>\n\n4<|im_end|>⟧"),
        (BOTH, OWN, "<think>\n⟦add two\n</think>\n\n4<|im_end|>⟧"),
        (BOTH, EMPTY, "<think>\n⟦\n</think>\n\n4<|im_end|>⟧"),
        (CLOSES, TALK, "⟦<think></think>4<|im_end|>⟧"),
        (CLOSES, OWN, "⟦<think>\nadd two\n</think>\n\n4<|im_end|>⟧"),
        (OFF, TALK, "</think>⟦4<|im_end|>⟧"),
        (OFF, EMPTY, "</think>⟦4<|im_end|>⟧"),
        (SHUTS, TALK, CHANNEL + "<channel|>⟦4<|im_end|>⟧"),
        (SHUTS, [user("2+2"), said(CHANNEL + "<channel|>4")], CHANNEL + "<channel|>⟦4<|im_end|>⟧"),
        ((WRAPS, "<|START_THINKING|>"), TALK, "<|START_THINKING|>⟦<|END_THINKING|><answer>4</answer>\n<|im_end|>⟧"),
        (
            (WRAPS, "<|START_THINKING|><|END_THINKING|>"),
            TALK,
            "<|START_THINKING|><|END_THINKING|>⟦<answer>4</answer>\n<|im_end|>⟧",
        ),
        (("</think>\n" + SAYS + "\n", "<think>"), TALK, "<think>⟦</think>\n4\n<|im_end|>⟧"),
    ],
)
def test_a_thought_is_opened_once_and_closed_once(forms, talk, expected):
    assert read([{"messages": talk}], template=template(*forms)) == [QUESTION + expected]
    pair = {"prompt": talk[:1], "chosen": talk[1:], "rejected": [said("5")]}
    assert read([pair], "preference", template=template(*forms))[0] == QUESTION + expected


def test_thoughts_of_earlier_turns_are_rows_of_their_own_where_they_take_the_place_of_empty_ones():
    first, second = read([{"messages": [*OWN, user("3+3"), said("6")]}], template=template(*CLOSES))
    assert first == QUESTION + "⟦<think>\nadd two\n</think>\n\n4<|im_end|>⟧"
    assert second.endswith(turn("user", "3+3") + OPENS + "⟦<think></think>6<|im_end|>⟧")


def test_thoughts_behind_a_closed_thought_say_which_keyword_leaves_it_open():
    way = 'turn thinking on for the row (chat_template_kwargs: {"enable_thinking": true})'
    channel = CHANNEL + "add two<channel|>4"
    for forms, answer in ((OFF, OWN[1]["content"]), (SHUTS, channel)):
        for row in ({"messages": [user("2+2"), said(answer)]}, {"prompt": "2+2", "completion": answer}):
            problem = refused(read, [row], template=template(*forms))
            assert "and the chat template's prompt has closed that already: " + way in problem
            assert "add two" in read([row | ON], template=template(*forms))[0].partition("⟦")[2]
    assert read([{"messages": OWN} | ON], template=template(*OFF)) == [QUESTION + "<think>⟦\nadd two\n</think>\n\n4<|im_end|>⟧"]
    never = template(SAYS, "</think>")
    assert "has closed that already (data.on_bad_row" in refused(read, [{"messages": OWN}], template=never)


def test_reasoning_behind_a_closed_thought_is_not_lost_in_silence():
    off = {"messages": TOLD, "chat_template_kwargs": {"enable_thinking": False}}
    problem = refused(read, [off], template=template(*REASONS))
    assert "the reasoning of message 2 (assistant) has no place, because the chat template's prompt ends with" in problem
    assert '(data.ignore leaves it unread): turn thinking on for the row (chat_template_kwargs: {"enable_th' in problem
    assert read([{"messages": TOLD}], template=template(*REASONS)) == [QUESTION + "⟦<think>\nadd two\n</think>\n\n4<|im_end|>⟧"]


def test_thoughts_that_a_template_would_wrap_as_an_answer_are_refused():
    talk = [user("2+2"), said("<|START_THINKING|>add two<|END_THINKING|>4")]
    problem = refused(read, [{"messages": talk}], template=template(WRAPS, "<|START_THINKING|>"))
    assert "writes '<answer>' before the answer of a conversation, and prompts with '<|START_THINKING|>'" in problem
    assert "give the thoughts as reasoning_content, or prompt and completion as texts" in problem
