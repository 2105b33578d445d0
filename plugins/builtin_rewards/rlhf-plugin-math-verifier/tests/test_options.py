"""Effects of the options, and contents of a reward."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from rlhf_plugin_math_verifier import MathVerifier
from rlhf_plugin_math_verifier.answers import Number
from rlhf_plugin_math_verifier.candidates import find
from rlhf_plugin_math_verifier.characters import fold
from rlhf_plugin_math_verifier.decoration import tidy
from rlhf_plugin_math_verifier.reading import read

from rlhf_host import Reward, Segment, Task, Trajectory


def values(subject, trajectory, *texts, label="72"):
    return [reward.value for reward in asyncio.run(subject.score([trajectory(text, label) for text in texts], None))]


def test_rewards_come_in_order_with_score_and_metrics(verifier, trajectory):
    subject = verifier(correct=2.0, incorrect=-1.0)
    rewards = asyncio.run(subject.score([trajectory(text, "x^2") for text in (r"\boxed{y}", r"\boxed{x*x}", "none")], None))
    assert [(reward.value, reward.score) for reward in rewards] == [(-1.0, 0.0), (2.0, 1.0), (-1.0, 0.0)]
    assert rewards[0].metrics == {"math_verifier/formatted": 1.0, "math_verifier/timeout": 0.0}
    assert rewards[2].metrics == {"math_verifier/formatted": 0.0, "math_verifier/timeout": 0.0}


def test_format_credit_is_for_wrong_answers_that_are_marked(verifier, trajectory):
    subject = verifier(incorrect=-1.0, format_credit=0.25)
    texts = (r"\boxed{72}", "it is 72", r"\boxed{73}", "#### 73", "The answer is 73", "it is 73", r"\boxed{}", "")
    assert values(subject, trajectory, *texts) == [1.0, 1.0, -0.75, -0.75, -0.75, -1.0, -1.0, -1.0]


def test_answer_says_where_answers_may_stand(verifier, trajectory):
    texts = (r"\boxed{72}", "so\n#### 72", "The answer is 72", "72")
    assert values(verifier(answer="any"), trajectory, *texts) == [1, 1, 1, 1]
    assert values(verifier(answer="boxed"), trajectory, *texts) == [1, 0, 0, 0]
    assert values(verifier(answer="hashes"), trajectory, *texts) == [0, 1, 0, 0]
    assert values(verifier(answer="boxed", format_credit=0.5), trajectory, r"\boxed{7}", "#### 7") == [0.5, 0]


def test_decimals(verifier, trajectory):
    assert values(verifier(decimals=2), trajectory, "0.33", "0.3", label="1/3") == [1, 0]
    assert values(verifier(decimals=2), trajectory, r"\boxed{1.41}", r"\boxed{1.4}", label=r"\sqrt{2}") == [1, 0]


def test_only_the_end_of_a_text_is_read(verifier, trajectory):
    assert values(verifier(max_chars=10), trajectory, "72" + " " * 10, " " * 10 + "72") == [0, 1]


def test_thoughts_are_not_judged_unless_asked_for(verifier, trajectory):
    texts = (r"<think>\boxed{71}</think>\boxed{73}", r"<plan>\boxed{73}</plan>\boxed{72}", r"<plan>\boxed{72}")
    assert values(verifier(), trajectory, *texts) == [0, 1, 1]
    assert values(verifier(thoughts="<plan> </plan>"), trajectory, *texts) == [0, 1, 0]
    assert values(verifier(thoughts=[]), trajectory, r"<think>\boxed{72}", r"\boxed{72}</think>73") == [1, 1]
    with pytest.raises(ValidationError, match="no pair of markers"):
        MathVerifier.Options(thoughts="<plan>")


@pytest.mark.parametrize(("said", "score"), [(r"so \boxed{72}", 0.0), (r"maybe 73</think>\boxed{72}", 1.0)])
def test_a_chat_template_may_open_the_thoughts(verifier, said, score):
    text = {1: "Solve it.<assistant>", 2: "<think>\n", 3: said}
    segments = [Segment("prompt", [1, 2]), Segment("action", [3])]
    row = Trajectory("e", "g", Task("q", ground_truth=72), segments, decode=lambda ids: "".join(text[number] for number in ids))
    assert asyncio.run(verifier().score([row], None))[0].score == score


def test_the_last_action_counts(verifier):
    segments = [Segment("prompt", [0]), Segment("action", [1]), Segment("observation", [2]), Segment("action", [3])]
    text = {0: "", 1: r"\boxed{72}", 2: r"\boxed{72}", 3: r"\boxed{73}"}
    turns = Trajectory("e", "g", Task("q", ground_truth=72), segments, decode=lambda ids: text[ids[0]])
    assert asyncio.run(verifier().score([turns], None))[0].score == 0.0


def test_a_wrong_answer_may_not_earn_more_than_a_right_one():
    with pytest.raises(ValidationError, match=r"incorrect \+ format_credit is 1.5, more than correct \(1\)"):
        MathVerifier.Options(format_credit=1.5)


@pytest.mark.parametrize(
    "bad", [{"timeout_s": 0}, {"workers": 0}, {"answer": "first"}, {"correct": float("nan")}, {"time_out": 1}]
)
def test_bad_options_are_refused(bad):
    with pytest.raises(ValidationError):
        MathVerifier.Options(**bad)


def test_every_option_has_a_description():
    assert all(field.description for field in MathVerifier.Options.model_fields.values())


def test_the_import_is_light():
    heavy = "torch", "sympy", "math_verify", "multiprocessing", "transformers", "numpy"
    code = f"import sys, rlhf_plugin_math_verifier; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


fragments = st.sampled_from(
    [
        r"\boxed{",
        "}",
        "{",
        "$",
        "$$",
        "####",
        "\n",
        "answer is",
        "Answer:",
        "-",
        "72",
        "1,2",
        "/",
        "%",
        "e9",
        ".",
        "=",
        r"\frac",
        r"\[",
        "\\",
    ]
)


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(st.text(), st.lists(st.one_of(fragments, st.text(max_size=3))).map("".join)),
    st.sampled_from(["any", "boxed", "hashes"]),
)
@example("ANSWER IS;\r", "any")
@example("5 $$ \n$$", "any")
def test_any_text_is_read_without_an_error(text, form):
    for prose in (False, True):
        found = find(fold(text), form, prose=prose)
        assert found is None or found.claim.text == found.claim.text.strip()
    tidy(text)
    read(text)
    read(text, label=True)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(fragments, st.text(max_size=3))).map("".join))
def test_any_text_gets_one_of_the_rewards_or_goes_to_a_worker(text):
    subject = MathVerifier(MathVerifier.Options(correct=1.0, incorrect=-1.0, format_credit=0.5))
    made = Trajectory("e", "g", Task("q", ground_truth=72), [Segment("action", [1])], decode=lambda ids: text)

    verdict = subject._at_once(made)
    assert not isinstance(verdict, Reward) or verdict.value in (1.0, -1.0, -0.5)


@settings(max_examples=100, deadline=None)
@given(st.fractions(max_denominator=1000))
def test_fractions_are_read_as_written(value):
    assert read(str(value)) == Number(value)
    assert read(rf"\frac{{{value.numerator}}}{{{value.denominator}}}") == Number(value)
    assert find(f"so it is {value}").claim.text == str(value)
