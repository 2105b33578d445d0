"""Gradients in float64 and short runs: what is right passes, and planted mistakes do not."""

from __future__ import annotations

import pytest
from rlhf_authoring import learning
from rlhf_authoring.contracts.subject import Broken, Subject
from rlhf_authoring.gradients import LARGEST, compare
from rlhf_authoring.learning import NotShown, learn

from .climbing import ON_ACTIONS, algorithm_source

RIGHT = "-advantages * logprobs"
CURVED = "-advantages * logprobs + 0.1 * logprobs ** 2"
LOSSES = {
    "right": RIGHT,
    "curved": CURVED,
    "detached_term": "-advantages * logprobs + 0.1 * logprobs.detach() ** 2",
    "detached_factor": "-advantages * logprobs.detach().exp() * logprobs",
    "no_grad_factor": "-advantages * _without(logprobs) * logprobs",
    "float32": f"({CURVED}).float()",
    "flipped": f"_Wrong.apply({CURVED})",
    "in_place": f"_InPlace.apply(({CURVED}).clone())",
    "scaled": f"_Scaled.apply({CURVED})",
    "of_nothing": "-advantages * logprobs.detach()",
}
FUNCTIONS = """
def _functions():
    import torch

    def function(name, factor, in_place=False):
        class Planted(torch.autograd.Function):
            @staticmethod
            def forward(ctx, values):
                if in_place:
                    ctx.mark_dirty(values)
                    return values.mul_(1.0)
                return values * 1.0

            @staticmethod
            def backward(ctx, gradient):
                return factor * gradient
        return Planted

    def without(values):
        with torch.no_grad():
            return values.exp()

    return function("wrong", -1.0), function("in_place", -1.0, True), function("scaled", 1.001), without

_Wrong, _InPlace, _Scaled, _without = _functions()
"""


@pytest.fixture
def algorithm(tmp_path):
    """An algorithm in a file: loss and advantages → the subject."""

    def write(loss="right", advantages=ON_ACTIONS, **options):
        file = tmp_path / "climb.py"
        file.write_text(algorithm_source(LOSSES[loss], advantages) + FUNCTIONS)
        return Subject("algo", f"{file}:Climb", options)

    return write


@pytest.mark.parametrize("loss", ["right", "curved"])
def test_a_right_gradient_is_exact(algorithm, loss):
    (compared,) = compare(algorithm(loss))
    assert compared.case == "loss"
    assert compared.error < 1e-8
    assert not compared.held


@pytest.mark.parametrize("loss", ["detached_term", "detached_factor", "no_grad_factor"])
def test_a_stopped_gradient_is_exact_only_with_what_it_stops_held_fixed(algorithm, loss):
    (compared,) = compare(algorithm(loss))
    assert compared.held
    assert compared.error < 1e-8


@pytest.mark.parametrize(("loss", "least"), [("flipped", 1.0), ("in_place", 1.0), ("scaled", 1e-4)])
def test_a_wrong_backward_pass_is_found(algorithm, loss, least):
    (compared,) = compare(algorithm(loss))
    assert compared.error > max(least, LARGEST)
    assert not compared.held


@pytest.mark.parametrize(("loss", "said"), [("float32", "is float32 where everything"), ("of_nothing", "has no gradient")])
def test_a_loss_that_cannot_be_compared_is_broken(algorithm, loss, said):
    with pytest.raises(Broken, match=said):
        list(compare(algorithm(loss)))


def test_what_learns_rises_on_both_tasks(algorithm):
    runs = list(learn(algorithm()))
    assert [run.task for run in runs] == list(learning.WANTED)
    for run in runs:
        assert run.rises
        assert run.before < 0.3
        assert run.after > 0.6


@pytest.mark.parametrize(
    "advantages",
    [
        "-F.on_actions(values, experience.action_mask)",  # the wrong sign
        "F.on_actions(values.roll(1), experience.action_mask)",  # another row's
        "F.on_actions((experience.completion_ids[:, 0] % 2).double() - 0.5, experience.action_mask)",  # not the reward's
    ],
)
def test_what_does_not_learn_does_not_rise(algorithm, advantages, monkeypatch):
    monkeypatch.setattr(learning, "STEPS", 16)
    assert not all(run.rises for run in learn(algorithm(advantages=advantages)))


def test_a_reward_that_is_always_the_same_shows_nothing(tmp_path):
    file = tmp_path / "same.py"
    file.write_text(
        "from rlhf_host import hookimpl\n\nclass Same:\n    @hookimpl\n    def score(self, trajectories):\n"
        "        return [0.25 for _ in trajectories]\n"
    )
    with pytest.raises(NotShown, match=r"all 256 answers to the made task have the reward 0.25"):
        list(learn(Subject("reward", f"{file}:Same")))


@pytest.mark.parametrize("kind", ["tracker", "extension", "engine", "tasks"])
def test_kinds_without_a_policy_say_so_by_name(kind):
    with pytest.raises(NotShown, match=f"does not apply to the kind {kind}"):
        list(learn(Subject(kind, "any")))
