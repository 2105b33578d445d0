"""Signs that a run goes wrong: each is reported once, with its value, and a healthy run has none."""

from __future__ import annotations

import math

import pytest

from rlhf_host.runs.signs import BEGINNING, GONE, Signs

HEALTHY = {
    "entropy": 0.8, "rollout/identical": 0.3, "rollout/dropped": 3.0, "rollout/groups": 8.0, "mismatch/mean": 0.01,
    "mismatch/k3": 0.001, "grad_norm": 0.5, "groups/no_variance": 0.4, "truncated": 0.2,
}  # fmt: skip

BAD = [
    ({"entropy": 0.03}, "entropy is 0.03, and was 0.8 in the first steps"),
    ({"rollout/identical": 0.95}, "in 95% of the groups all answers are the same"),
    ({"rollout/dropped": 152.0}, "filters dropped 95% of the groups"),
    ({"mismatch/mean": 0.06}, "mismatch/mean is 0.06, more than 0.05: the engine"),
    ({"mismatch/k3": 0.5}, "mismatch/k3 is 0.5, more than 0.01: the engine"),
    ({"grad_norm": 0.0}, "grad_norm is 0"),
    ({"truncated": 1.0}, "100% of the trajectories are cut off"),
    ({"eval/unjudged": 574.0}, "574 held-out answers could not be judged (eval/unjudged) and are left out"),
    ({"eval/failed": 550.0}, "550 held-out episodes failed (eval/failed): they count as wrong"),
    ({"rollout/failed": 3.0}, "3 episodes failed (rollout/failed) and are left out"),
    ({"rollout/unjudged": 3.0}, "3 trajectories could not be judged (rollout/unjudged)"),
]


@pytest.fixture
def signs():
    signs = Signs()
    for _ in range(BEGINNING):
        assert signs.look(HEALTHY) == []
    return signs


@pytest.mark.parametrize(("values", "report"), BAD)
def test_a_sign_is_reported_once_and_again_after_it_was_gone(signs, values, report):
    (first,) = signs.look(HEALTHY | values)
    assert report in first
    for _ in range(3 * GONE):
        assert signs.look(HEALTHY | values) == []
    for _ in range(GONE - 1):
        assert signs.look(HEALTHY) == []
    assert signs.look(HEALTHY | values) == [], "it was away too shortly"
    for _ in range(GONE):
        assert signs.look(HEALTHY) == []
    assert signs.look(HEALTHY | values) == [first]


def test_what_is_not_measured_is_no_sign(signs):
    assert signs.look({}) == []
    assert signs.look(dict.fromkeys(HEALTHY, math.nan)) == []
    assert signs.look({"rollout/dropped": 0.0, "rollout/groups": 0.0}) == []


def test_an_entropy_that_was_always_low_is_none():
    signs = Signs()
    assert [report for _ in range(30) for report in signs.look({"entropy": 0.01})] == []


def test_a_model_that_has_learned_the_answers_gives_them_every_time(signs):
    assert signs.look(HEALTHY | {"rollout/identical": 0.95, "entropy": 0.01, "score/mean": 0.95}) == []
    assert signs.look(HEALTHY | {"rollout/identical": 0.95, "score/mean": 0.5}) != []


def test_without_variance_a_gradient_of_0_is_explained_by_that(signs):
    assert signs.look(HEALTHY | {"grad_norm": 0.0, "groups/no_variance": 1.0}) == []


def test_a_run_says_it_in_its_log(rlhf_here, small_run, tmp_path, caplog):
    short = rlhf_here(*small_run, "--run-dir", tmp_path / "run", "--train.steps", "3", "--rollout.max-new-tokens", "1")
    assert short.exit_code == 0, short.output
    assert caplog.text.count("step 1: 100% of the trajectories are cut off (truncated)") == 1
    assert caplog.text.count("cut off") == 1
