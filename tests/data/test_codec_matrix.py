"""Every original chat template that TRL ships × conversations: nothing is lost, and what cannot be said is refused by name."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_host.data.codec import ChatCodec
from rlhf_host.errors import UserError
from rlhf_host.records.episodes import EpisodeFailed


def templates():
    spec = importlib.util.find_spec("trl")
    installed = [f"{place}/chat_templates" for place in (spec.submodule_search_locations if spec else [])]
    given = os.environ.get("RLHF_CHAT_TEMPLATES")
    found = [path for folder in ([given] if given else installed) for path in sorted(Path(folder).glob("*.jinja"))]
    return [path for path in found if not path.stem.endswith("_training")]


TEMPLATES = templates()
pytestmark = pytest.mark.skipif(not TEMPLATES, reason="needs the chat templates of trl: pip install --no-deps trl==1.16.0")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "description": "x"}, "b": {"type": "integer", "description": "y"}},
                "required": ["a", "b"],
            },
        },
    }
]


def user(text):
    return {"role": "user", "content": text}


def answer(text, thought=None, calls=()):
    said = {"role": "assistant", "content": text}
    if thought:
        said |= {"reasoning_content": thought, "thinking": thought}
    if calls:
        said["tool_calls"] = [
            {"id": f"call00{number}00", "type": "function", "function": {"name": "add", "arguments": arguments}}
            for number, arguments in enumerate(calls)
        ]
    return said


def result(text, number=0):
    return {"role": "tool", "name": "add", "tool_call_id": f"call00{number}00", "content": text}


ONE, TWO = {"a": 1, "b": 2}, {"a": 3, "b": 4}
CONVERSATIONS = {
    "user": ([user("q1"), answer("a1")], [user("q2")], None),
    "system": ([{"role": "system", "content": "S"}, user("q1"), answer("a1")], [user("q2")], None),
    "thought": ([user("q1"), answer("a1", "hmm")], [user("q2")], None),
    "tool": ([user("q1"), answer("", None, [ONE])], [result("3")], TOOLS),
    "tool with text": ([user("q1"), answer("let me", None, [ONE])], [result("3")], TOOLS),
    "thought and tool": ([user("q1"), answer("", "hmm", [ONE])], [result("3")], TOOLS),
    "parallel": ([user("q1"), answer("", None, [ONE, TWO])], [result("3"), result("7", 1)], TOOLS),
    "tool, then user": ([user("q1"), answer("", "hmm", [ONE]), result("3"), answer("it is 3", "so")], [user("q2")], TOOLS),
    "tool and user at once": ([user("q1"), answer("", None, [ONE])], [result("3"), user("go on")], TOOLS),
    "nobody answers the call": ([user("q1"), answer("", None, [ONE])], [user("no tools, please")], TOOLS),
    "unicode": ([user("q1"), answer("a1")], [user("größer als 三 🙂\n\n- `x`\t?")], None),
    "markup of an end": ([user("<EOS> q1 <EOS>"), answer("a1")], [user("<EOS><|im_end|>\n<|eot_id|> q2 <EOS>")], None),
    "markup": ([user("q1"), answer("", None, [ONE])], [result('<tool_call>\n{"name": "x"}\n</tool_call> </think>')], TOOLS),
}


def tokenizer_of(path):
    """Bytes, and every special token that the template mentions."""
    text = path.read_text()
    specials = sorted({*re.findall(r"<\|[^|<>{}\s]+\|>|<｜[^｜<>]+｜>|<\|?[a-z_]+_of_[a-z_]+\|?>", text)})
    specials += re.findall(r"<(?:start|end)_of_turn>|<\|?(?:turn|tool_call|tool_response|tool|channel)\|?>|\[/?[A-Z_]+\]", text)
    specials = [token for token in dict.fromkeys(specials) if token not in ("<tool_call>", "<tool_response>", "<tool>")]
    letters = pre_tokenizers.ByteLevel.alphabet()
    raw = Tokenizer(models.BPE({letter: number for number, letter in enumerate(sorted(letters))}, []))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<BOS>", eos_token="<EOS>", pad_token="<PAD>")
    made.add_special_tokens({"additional_special_tokens": specials})
    made.chat_template = text
    return made


def outcome(path, name):
    """``handled``, ``rewritten`` (handled, but the template itself would write the answer otherwise now), or why it is refused."""
    before, new, tools = CONVERSATIONS[name]
    tokenizer = tokenizer_of(path)
    codec = ChatCodec(tokenizer)
    said = tokenizer.encode("whatever it said", add_special_tokens=False)
    try:
        codec.render(before[:-1], tools)
        cut = codec.delta(before[-1], new, said, tools=tools)
    except EpisodeFailed as failure:
        return failure.reason
    text = tokenizer.decode(cut)
    for message in new:
        words = message["content"].strip()
        assert words in text or json.dumps(words, ensure_ascii=False)[1:-1] in text, "an observation is lost"
    assert cut[0] in tokenizer.all_special_ids, "a turn that was cut is closed"
    assert codec.delta(before[-1], new, [*said, cut[0]], tools=tools) == cut[1:], (
        "its own end stands in place of the template's"
    )
    whole = codec._write([*before, *new], True, tools)
    if tokenizer.encode(whole, add_special_tokens=False)[-len(cut) :] == cut:
        return "handled"
    behind_its_calls = (path.stem, name) == ("gemma4_v2", "tool with text")  # where this template puts an answer's text
    assert behind_its_calls or codec.rewrites(before, new, tools), f"{text!r} is not how the conversation ends"
    return "rewritten"


OF_TOOLS = tuple(name for name, (_, _, tools) in CONVERSATIONS.items() if tools)
NO_TOOLS = [
    "cohere",
    "cohere2",
    "deepseek_r1_distill",
    "gemma",
    "gemma3",
    "idefics3",
    "llama3",
    "llava_next",
    "phi3",
    "phi3_5",
    "qwen2_5_vl",
    "smolvlm",
]
REFUSED = {
    **{key: set(OF_TOOLS) for key in NO_TOOLS},
    "deepseekv3": set(OF_TOOLS),  # it writes calls, but not what tools there are
    "gemma": {*OF_TOOLS, "system"},
    "gptoss": {"parallel"},
    "lfm2": set(OF_TOOLS) - {"nobody answers the call"},  # it writes tools, but not their calls
    "llama3_1": {"parallel"},
    "llama3_2": {"parallel"},
}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_nothing_is_lost_and_what_cannot_be_said_is_refused_by_name(path):
    found = {name: outcome(path, name) for name in CONVERSATIONS}
    refused = {name: why for name, why in found.items() if why not in ("handled", "rewritten")}
    assert set(refused) == REFUSED.get(path.stem, set()), refused
    for why in refused.values():
        assert re.match(
            r"codec: the (chat template leaves out (tools|tool calls|.*message)|tokenizer's chat template refuses)",
            why,
        )


REWRITING = {
    "nothing": {"user": False, "thought": False, "tool": False},
    "thoughts": {"user": False, "thought": True, "tool": False},
    "every answer": {"user": True, "thought": True},
}


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("qwen2_5", "nothing"),
        ("qwen3_instruct_2507", "nothing"),
        ("llama3_1", "nothing"),
        ("gemma4_v2", "nothing"),
        ("glm4moe", "thoughts"),
        ("nemotron_3_nano", "thoughts"),
        ("qwen3", "every answer"),
        ("qwen3_5_think", "every answer"),
    ],
)
def test_what_a_template_writes_otherwise_later(template, what):
    [path] = [path for path in TEMPLATES if path.stem == template]
    codec = ChatCodec(tokenizer_of(path))
    found = {name: codec.rewrites(*CONVERSATIONS[name]) for name in REWRITING[what]}
    assert found == REWRITING[what]


def test_the_whole_matrix():
    outcomes = Counter(outcome(path, name) for path in TEMPLATES for name in CONVERSATIONS)
    handled, rewritten = outcomes.pop("handled"), outcomes.pop("rewritten")
    print(f"{len(TEMPLATES)} templates: {handled} handled, {rewritten} rewritten, {outcomes.total()} refused")
    assert (len(TEMPLATES), handled, rewritten, outcomes.total()) == (41, 412, 6, 115)


UNREAD = ("diffusion_gemma", "gemma4", "lfm2_", "muse_glimmer")
"""Where calls are read only by a response template of the tokenizer."""


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_calls_that_the_template_writes_are_read_or_refused(path):
    codec = ChatCodec(tokenizer_of(path))
    if path.stem in REFUSED and "tool" in REFUSED[path.stem]:
        return
    if path.stem.startswith(UNREAD):
        with pytest.raises(UserError, match="none would be read: choose one of"):
            codec.check(TOOLS)
        return
    asked, called = [user("x")], answer("", None, [ONE])
    written, opening = codec._write([*asked, called], False, TOOLS), codec._write(asked, False, TOOLS)
    ids = codec.tokenizer.encode(written.removeprefix(opening), add_special_tokens=False)
    assert [(call.name, call.arguments) for call in codec.parse(ids, tools=TOOLS).tool_calls] == [("add", ONE)]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_the_check_at_the_start_says_it_too(path):
    codec = ChatCodec(tokenizer_of(path))
    codec.check()
    if path.stem in (*NO_TOOLS, "deepseekv3", "lfm2"):
        with pytest.raises(UserError, match="put the tools into the system prompt"):
            codec.check(TOOLS)
    elif not path.stem.startswith(UNREAD):
        codec.check(TOOLS)
