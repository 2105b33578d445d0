"""Who says what in the texts that chat templates leave, without their special tokens and with them."""

from __future__ import annotations

import pytest
from rlhf_runs.speakers import turns_of, turns_of_messages

TWO = [("System", "Be brief."), ("User", "How many?\n\nTell the user\nall.")]


@pytest.mark.parametrize(
    "text",
    [
        "system\nBe brief.\nuser\nHow many?\n\nTell the user\nall.\nassistant\n",
        "system\n\nBe brief.user\n\nHow many?\n\nTell the user\nall.assistant",
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHow many?\n\n"
        "Tell the user\nall.<|im_end|>\n<|im_start|>assistant\n",
        "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHow many?\n\n"
        "Tell the user\nall.<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ],
)
def test_templates(text):
    assert turns_of(text) == TWO


@pytest.mark.parametrize("text", ["12+34=", "", "Ask\nuser\nabout it", "users\nand others", "The user\nasks"])
def test_other_texts_have_no_speakers(text):
    assert turns_of(text) == []


def test_messages():
    picture = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]}
    assert turns_of_messages([{"role": "user", "content": picture}, call, {"role": "judge", "content": "ok"}]) == [
        ("User", "[image]\nWhat is it?"),
        ("Model", '[{"name": "look"}]'),
        ("Judge", "ok"),
    ]
    assert turns_of_messages("a text") == []
