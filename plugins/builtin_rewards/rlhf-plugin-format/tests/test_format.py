"""Forms that answers have, and that they have not."""

import time

import pytest
from rlhf_authoring import reward_contract
from rlhf_plugin_format import Format

from rlhf_host import Segment, Task, Trajectory, Unjudged, UserError

TestTags = reward_contract("format", {"tags": ["think", "answer"], "partial": True, "max_tokens": 8})
TestPattern = reward_contract("format", {"pattern": r".*\d+"})


def judged(*texts, prompt="1+1=", **options):
    """The reward of one episode; each text is a turn, each character a token."""
    words = [prompt, *texts]
    segments = [Segment("prompt", [0]), *(Segment("action", [i + 1] * len(text)) for i, text in enumerate(texts))]
    row = Trajectory("e", "g", Task(prompt), segments, decode=lambda ids: words[ids[0]] if ids else "")
    [found] = Format(Format.Options(**options)).score([row], None)
    return found


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<think>a</think>\n<answer>2</answer>\n", True),
        ("<think>a</think> so <answer>2</answer>", False),
        ("<answer>2</answer><think>a</think>", False),
        ("<think>a</think><answer> </answer>", False),
        ("<think>a<answer>2</answer></think>", False),
        ("<think>a</think><think>b</think><answer>2</answer>", False),
        ("</think>a<think><answer>2</answer>", False),
        ("<think>a</think><answer>2", False),
        ("", False),
    ],
)
def test_tags(text, right):
    found = judged(text, tags="think,answer")
    assert (found.value, found.score, found.metrics) == (right, None, {"format/tags": float(right)})


def test_text_between_tags_and_tags_that_the_prompt_opened():
    assert judged("Well. <answer>2</answer> Yes.", tags=["answer"], between=True).value == 1.0
    assert judged("a</think><answer>2</answer>", prompt="1+1=\n<think>\n", tags="think,answer").value == 1.0
    assert judged("a</think><answer>2</answer>", tags="think,answer").value == 0.0


def test_tags_that_the_template_opens_before_each_answer():
    right = "a</think><answer>2</answer>"
    texts = ["1+1=<think>", right, "no, again<think>\n", right, "or so", f"<think>{right}"]
    kinds = ["prompt", "action", "observation", "action", "observation", "action"]
    segments = [Segment(kind, [i]) for i, kind in enumerate(kinds)]

    def value(end, **options):
        row = Trajectory("e", "g", Task("1+1="), segments[:end], decode=lambda ids: "".join(texts[i] for i in ids))
        return Format(Format.Options(tags="think,answer", **options)).score([row], None)[0].value

    assert [value(end, turns="all") for end in (2, 4, 6)] == [1.0, 1.0, 1.0]
    assert [value(end) for end in (2, 4, 6)] == [1.0, 1.0, 1.0]
    texts[4] = "again<think>"
    assert value(6, turns="all") == 0.0, "the last answer opens the tag a second time"


def test_a_pattern_is_of_the_whole_answer():
    assert judged("so\n#### 42 ", pattern=r".*#### -?\d+").value == 1.0
    assert judged("#### 42 or so", pattern=r"#### \d+").value == 0.0


def test_a_pattern_that_takes_for_ever_judges_nothing():
    began = time.monotonic()
    found = judged("a" * 60 + "!", pattern="(a|aa)+b|(a+)+$")
    assert isinstance(found, Unjudged)
    assert time.monotonic() - began < 5


def test_length_parts_and_turns():
    assert [judged("a" * n, min_tokens=2, max_tokens=3).value for n in range(5)] == [0, 0, 1, 1, 0]
    half = judged("aaaa", pattern="a+", max_tokens=3, partial=True)
    assert (half.value, half.metrics) == (0.5, {"format/pattern": 1.0, "format/length": 0.0})
    assert judged("no", "ok", pattern="ok").value == 1.0
    assert judged("no", "ok", pattern="ok", turns="all").value == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "asks for nothing"),
        ({"pattern": "("}, "no regular expression"),
        ({"tags": "<think>"}, "'<think>' is no name of a tag"),
        ({"tags": "a,a"}, "a tag stands twice"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens 3 is more than max_tokens 2"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UserError, match=message):
        Format(Format.Options(**options))
