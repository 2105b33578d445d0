"""Advantages against a loop in float64, what they do not depend on, and the gradient that they estimate."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_authoring import make_batch
from rlhf_plugin_remax import GREEDY, ReMax

from rlhf_host import Drop, Group, Outputs, Segment, Task, Trajectory, UserError

OPTIONS = ReMax.Options()


def a_batch(groups, greedy, rewards, lengths=None, shaped=0.0, **more):
    """A batch with the column that the agent gives, and a KL in the reward of some size."""
    batch = make_batch(lengths or [1 + row % 4 for row in range(len(groups))], groups=groups, rewards=rewards, **more)
    batch.columns[GREEDY] = torch.tensor(greedy, dtype=torch.float32)
    noise = torch.randn(batch.action_mask.shape, generator=torch.Generator().manual_seed(2))
    batch.shaped = torch.where(batch.action_mask, shaped * noise, torch.nan)
    return batch


def by_loops(batch):
    """``A_it = R_i − R_greedy + Σ_{s≥t} x_is``, token by token."""
    rows, width = batch.action_mask.shape
    expected = [[0.0] * width for _ in range(rows)]
    for row in range(rows):
        own = int(batch.group_id[row])
        baseline = [
            float(batch.rewards[other])
            for other in range(rows)
            if batch.group_id[other] == own and batch.columns[GREEDY][other]
        ]
        if not baseline or batch.columns[GREEDY][row]:
            continue
        for at in range(width):
            if batch.action_mask[row, at]:
                later = [float(batch.shaped[row, s]) for s in range(at, width) if batch.action_mask[row, s]]
                expected[row][at] = float(batch.rewards[row]) - baseline[0] + math.fsum(later)
    return torch.tensor(expected, dtype=torch.float64)


@st.composite
def batches(draw):
    """Groups of one to five rows in any order; some have no greedy answer."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    rows = [(group, float(sample == 0)) for group, size in enumerate(sizes) for sample in range(size)]
    if draw(st.booleans()):
        rows[0] = (0, 0.0)
    rows = draw(st.permutations(rows))
    numbers = st.floats(-1e3, 1e3, width=32)
    rewards = draw(st.lists(numbers, min_size=len(rows), max_size=len(rows)))
    lengths = draw(st.lists(st.integers(1, 7), min_size=len(rows), max_size=len(rows)))
    return a_batch(
        *map(list, zip(*rows, strict=True)),
        rewards,
        lengths,
        draw(st.sampled_from([0.0, 0.1])),
        observations=draw(st.booleans()),
    )


@settings(max_examples=60, deadline=None)
@given(batches())
def test_advantages_are_those_of_a_loop(batch):
    plugin = ReMax(OPTIONS)
    found = plugin.compute_advantages(batch).advantages
    expected = by_loops(batch)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * max(1.0, float(batch.rewards.abs().max())))
    trained = plugin.loss_masks(batch)
    greedy, answered = (
        batch.columns[GREEDY] == 1,
        {int(g) for g, one in zip(batch.group_id, batch.columns[GREEDY], strict=True) if one},
    )
    for row, mask in enumerate(trained):
        whole = not greedy[row] and int(batch.group_id[row]) in answered
        assert torch.equal(mask, batch.action_mask[row] if whole else torch.zeros_like(mask))


@settings(max_examples=30, deadline=None)
@given(st.floats(-1e3, 1e3), st.integers(2, 6))
def test_equal_rewards_teach_nothing_and_a_shift_changes_nothing(level, size):
    groups, greedy = [0] * size, [1.0] + [0.0] * (size - 1)
    assert not ReMax(OPTIONS).compute_advantages(a_batch(groups, greedy, [level] * size)).advantages.any()
    rewards = [float(number % 3) for number in range(size)]
    plain, moved = (
        ReMax(OPTIONS).compute_advantages(a_batch(groups, greedy, [reward + more for reward in rewards])).advantages
        for more in (0.0, round(level))
    )
    torch.testing.assert_close(plain, moved, rtol=0, atol=1e-3)


def test_metrics_tell_both_kinds_of_answers_apart():
    batch = a_batch([0, 0, 0, 1], [1, 0, 0, 0], [0.5, 1.0, 0.0, 7.0])
    found = {metric.name: metric for metric in ReMax(OPTIONS).compute_advantages(batch).metrics}
    means = {name: metric.values[metric.mask].double().mean().item() for name, metric in found.items()}
    assert means == pytest.approx({"remax/greedy": 0.5, "remax/sampled": 8 / 3, "remax/better": 0.5})


def test_the_expected_gradient_is_that_of_the_reward():
    """Over all answers of two tokens out of three, weighted by their probabilities, whatever the greedy answer is rewarded."""
    torch.manual_seed(0)
    first, then = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((3,), (3, 3)))
    answers = list(itertools.product(range(3), repeat=2))
    start, after = first.log_softmax(-1), then.log_softmax(-1)
    own = torch.stack([torch.stack([start[a], after[a, b]]) for a, b in answers])
    chances, rewards = own.sum(-1).exp(), torch.randn(9, dtype=torch.float64)
    best = max(range(9), key=lambda number: (float(start[answers[number][0]]), float(own[number, 1])))
    wanted = torch.autograd.grad((chances * rewards).sum(), (first, then), retain_graph=True)
    for baseline in (float(rewards[best]), 5.0):
        batch = a_batch([0] * 10, [1.0] + [0.0] * 9, [baseline, *rewards.tolist()], [2] * 10)
        plugin = ReMax(ReMax.Options(loss="pg"))
        batch.advantages = plugin.compute_advantages(batch).advantages
        batch.loss_mask = plugin.loss_masks(batch)
        (term,) = plugin.compute_loss(Outputs(logprobs=torch.cat([torch.zeros(1, 2), own])), batch)
        assert not term.values[0].any()
        expected = torch.autograd.grad(-(chances.detach() * term.values[1:].sum(-1)).sum(), (first, then), retain_graph=True)
        for one, each in zip(expected, wanted, strict=True):
            torch.testing.assert_close(one, each, rtol=1e-4, atol=1e-6)


# --- groups ---------------------------------------------------------------------------------------------------------------------


def row(sample, reward):
    segments = [Segment("prompt", [1]), Segment("action", [2], [-1.0], [0])]
    return Trajectory(f"a-{sample}", "a", Task(""), segments, sample=sample, reward=reward)


def test_a_group_without_a_judged_greedy_answer_is_dropped():
    plugin = ReMax(OPTIONS)
    for rows in ([row(1, 1.0), row(2, 0.0)], [row(0, None), row(1, 1.0)]):
        assert plugin.keep_group(Group("a", Task(""), rows)) == Drop("no_greedy_answer")
    assert plugin.keep_group(Group("a", Task(""), [row(1, 1.0), row(0, 0.0)])) is True


def test_saved_answers_of_another_agent_are_refused():
    plugin = ReMax(OPTIONS)
    plugin.check_run({"from_trajectories": "answers.jsonl"})
    with pytest.raises(UserError, match="those of a run with --agent remax"):
        plugin.compute_advantages(make_batch([1, 2]))


def test_unmarked_answers_are_said_once(caplog):
    plugin, batch = ReMax(OPTIONS), make_batch([1, 2], groups=[0, 0], rewards=[0.0, 1.0])
    batch.trajectories = [row(0, 0.0), row(1, 1.0)]
    for _ in range(2):
        assert plugin.compute_advantages(batch).advantages.sum(-1).tolist() == [0.0, 2.0]
    assert len(caplog.messages) == 1
