"""How alternatives, ranges and seeds are written, what samplers draw, and what values say."""

from __future__ import annotations

import pytest
from rlhf_sweep.results import By, _effect, read_by, usual_by
from rlhf_sweep.samplers import draw, key
from rlhf_sweep.space import Choices, Range, Varied, label, read_text, read_value, whole_numbers

from rlhf_host import UserError


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("rloo,grpo", ("rloo", "grpo")),
        ("1..4", (1, 2, 3, 4)),
        ("1e-6..1e-4:log:3", (1e-6, 1e-5, 1e-4)),
        ("0..1:lin:5", (0, 0.25, 0.5, 0.75, 1)),
        ("8..64:log:4", (8, 16, 32, 64)),
        ('["a","b"],["c,d"]', (["a", "b"], ["c,d"])),
        ('rloo,{"name": "grpo", "clip_eps": 0.1}', ("rloo", {"name": "grpo", "clip_eps": 0.1})),
        ('"a,b",c', ("a,b", "c")),
        ("../x.jsonl,..", ("../x.jsonl", "..")),
        ("a", ("a",)),
    ],
)
def test_alternatives_are_read(text, values):
    assert read_text(text, "--vary.x") == Choices(values)


def test_a_range_without_a_count_is_drawn_from():
    assert read_text("1e-6..1e-4:log", "--vary.x") == Range(1e-6, 1e-4, log=True, whole=False)
    assert read_value("1..9:lin", "f.yaml:1") == Range(1, 9, log=False, whole=True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,a", "a is there twice"),
        ("1e-4,0.0001", "0.0001 is there twice"),
        ("a,,b", "an alternative is empty"),
        ("3..1", "from a lower number to a higher one"),
        ("0..1:log:3", "begins above 0"),
        ("0.1..0.9", "say how it is divided"),
        ("1..5:lin:1", "2 values or more"),
        ("[a", "not closed"),
        ("[a],[b]", "is not JSON"),
    ],
)
def test_what_cannot_be_meant_is_refused(text, said):
    with pytest.raises(UserError, match=said):
        read_text(text, "--vary.x")


def test_a_file_has_lists_or_ranges():
    assert read_value([1, 2], "f.yaml:1") == Choices((1, 2))
    for wrong in ("a", 3, None, {"a": 1}):
        with pytest.raises(UserError, match="give a list"):
            read_value(wrong, "f.yaml:1")
    with pytest.raises(UserError, match="nothing to vary over"):
        read_value([], "f.yaml:1")


def test_seeds():
    assert whole_numbers("0..2", "--seeds") == [0, 1, 2]
    assert whole_numbers("7,3", "--seeds") == [7, 3]
    for text, said in (
        ("0,1,0", "seed 0 is there twice"),
        ("a", "whole numbers"),
        ("2..1", "whole numbers"),
        ("0..9999999", "million"),
    ):
        with pytest.raises(UserError, match=said):
            whole_numbers(text, "--seeds")


def test_numbers_have_one_name_however_they_are_written():
    assert {label(each) for each in ("1e-4", "0.0001", 1e-4)} == {"0.0001"}
    assert label({"name": "grpo", "clip_eps": 0.1}) == "grpo clip_eps=0.1"
    assert label(None) == "null"


SPACES = [Varied("algo", "", Choices(("rloo", "grpo"))), Varied("lr", "", Range(1e-6, 1e-3, log=True, whole=False))]


def test_draws_follow_from_their_seed_and_are_all_new():
    first = []
    for number in range(20):
        first.append(draw(SPACES, 0, number, first))
    assert len({key(values) for values in first}) == 20
    assert {values["algo"] for values in first} == {"rloo", "grpo"}
    assert sum(values["lr"] < 3e-5 for values in first) in range(5, 16)  # by its logarithm
    assert all(1e-6 <= values["lr"] <= 1e-3 for values in first)
    assert draw(SPACES, 0, 3, first[:3]) == first[3]
    assert draw(SPACES, 1, 3, first[:3]) != first[3]
    small = [Varied("algo", "", Choices(("rloo", "grpo")))]
    assert draw(small, 0, 2, [{"algo": "rloo"}, {"algo": "grpo"}]) is None


def test_the_metric_says_which_way_is_better():
    assert read_by("eval/loss") == By("eval/loss", low=True)
    assert read_by("kl:min") == By("kl", low=True)
    assert read_by("my:metric") == By("my:metric", low=False)
    assert usual_by([], None, "max") is None


def test_shares_of_the_variance():
    values = [1.0, 1.0, 3.0, 3.0]
    whole = _effect("lr", ["a", "a", "b", "b"], values)
    assert whole is not None
    assert (whole.share, whole.chance) == (1.0, pytest.approx(1 / 3))
    none = _effect("lr", ["a", "b", "a", "b"], values)
    assert none is not None
    assert none.share == 0
    ranks = _effect("lr", [1.0, 2.0, 3.0, 9.0], [1.0, 2.0, 4.0, 9.0])
    assert ranks is not None
    assert ranks.share == pytest.approx(1)
    assert _effect("lr", ["a", "b", "c", "d"], values) is None
