"""OTB against loops in float64, what its baseline does not depend on, and its variance beside that of others."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_authoring import make_batch
from rlhf_plugin_group_methods import OTB

from rlhf_host import LossTerm, Outputs
from rlhf_host import functional as F


def a_batch(groups, rewards, lengths, seed=0, shaped=0.0, **more):
    """A batch with made-up probabilities of the tokens, and of two draws that are equal: at least ``π²`` and at most 1."""
    batch = make_batch(lengths, groups=groups, rewards=rewards, **more)
    random = torch.Generator().manual_seed(seed)
    chances = torch.rand(batch.action_mask.shape, generator=random, dtype=torch.float64)
    rest = torch.rand(batch.action_mask.shape, generator=random, dtype=torch.float64)
    nan = ~batch.action_mask
    batch.logprobs["actor"] = chances.log().masked_fill(nan, math.nan)
    batch.collision["actor"] = (chances**2 + rest * (1 - chances) ** 2).masked_fill(nan, math.nan)
    noise = torch.randn(batch.action_mask.shape, generator=random)
    batch.shaped = (shaped * noise).masked_fill(nan, math.nan)
    return batch


def by_loops(batch, zero_tail):
    """Row by row and token by token: ``G_t − Σ_j G_jt·W_jt / Σ_j W_jt`` over rows with a ``t``-th action token."""
    places = [[at for at in range(mask.shape[0]) if mask[at]] for mask in batch.action_mask]
    to_go, weights = [], []
    for row, own in enumerate(places):
        gains = [float(batch.token_rewards[row, at]) + float(batch.shaped[row, at]) for at in own]
        to_go.append([math.fsum(gains[number:]) for number in range(len(own))])
        energy = [
            1 - 2 * math.exp(float(batch.logprobs["actor"][row, at])) + float(batch.collision["actor"][row, at]) for at in own
        ]
        weights.append([math.fsum(energy[: number + 1]) for number in range(len(own))])
    expected = torch.zeros(batch.action_mask.shape, dtype=torch.float64)
    for row, own in enumerate(places):
        rows = [other for other in range(len(places)) if batch.group_id[other] == batch.group_id[row]]
        equal = len({float(batch.rewards[other]) for other in rows}) == 1
        for number, at in enumerate(own):
            there = [other for other in rows if len(places[other]) > number]
            if len(there) == 1 and zero_tail and not equal:
                expected[row, at] = to_go[row][number]
                continue
            whole = math.fsum(weights[other][number] for other in there)
            mean = math.fsum(to_go[other][number] * weights[other][number] for other in there) / whole
            expected[row, at] = to_go[row][number] - mean
    return expected


@st.composite
def batches(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    groups = draw(st.permutations([group for group, size in enumerate(sizes) for _ in range(size)]))
    count = len(groups)
    rewards = draw(st.lists(st.integers(-3, 3).map(float), min_size=count, max_size=count))
    lengths = draw(st.lists(st.integers(1, 8), min_size=count, max_size=count))
    more = {"observations": draw(st.booleans()), "seed": draw(st.integers(0, 99)), "shaped": draw(st.sampled_from([0.0, 0.1]))}
    return a_batch(list(groups), rewards, lengths, **more)


@settings(max_examples=60, deadline=None)
@given(batches(), st.booleans())
def test_advantages_are_those_of_a_loop(batch, zero_tail):
    found = OTB(OTB.Options(zero_tail=zero_tail)).compute_advantages(batch).advantages
    torch.testing.assert_close(found.double(), by_loops(batch, zero_tail), rtol=1e-4, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(batches(), st.floats(-50, 50))
def test_a_reward_for_all_of_a_group_changes_nothing(batch, level):
    before = OTB(OTB.Options()).compute_advantages(batch).advantages
    last = batch.action_mask & (batch.action_mask.int().cumsum(-1) == batch.action_mask.sum(-1, keepdim=True))
    batch.rewards = batch.rewards + level
    batch.token_rewards = torch.where(last, batch.token_rewards + level, batch.token_rewards)
    torch.testing.assert_close(OTB(OTB.Options()).compute_advantages(batch).advantages, before, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("zero_tail", [False, True])
def test_equal_rewards_give_exactly_nothing(zero_tail):
    batch = a_batch([0] * 8, [0.1] * 8, [1, 2, 3, 4, 5, 6, 7, 8])
    assert not OTB(OTB.Options(zero_tail=zero_tail)).compute_advantages(batch).advantages.any()


def test_tokens_that_were_certain_are_compared_with_the_plain_mean():
    batch = a_batch([0, 0], [1.0, 0.0], [2, 2])
    for values in (batch.logprobs, batch.collision):
        values["actor"] = torch.zeros(2, 2) if values is batch.logprobs else torch.ones(2, 2)
    assert OTB(OTB.Options()).compute_advantages(batch).advantages.tolist() == [[0.5, 0.5], [-0.5, -0.5]]


def test_the_tail_of_the_longest_answer_has_its_own_reward_or_nothing():
    batch = a_batch([0, 0], [1.0, 0.0], [3, 1])
    tails = [
        OTB(OTB.Options(zero_tail=zero_tail)).compute_advantages(batch).advantages[0, 1:].tolist()
        for zero_tail in (False, True)
    ]
    assert tails == [[0.0, 0.0], [1.0, 1.0]]


def test_the_weights_are_squared_norms_of_the_score_by_the_logits():
    """``Σ_v (1[v = y] − π_v)² = 1 − 2·π_y + Σ_v π_v²``, by autograd; and the loss has the gradient of the loops' advantages."""
    logits = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    batch = make_batch([3, 2], groups=[0, 0], rewards=[1.0, -0.5], vocabulary=5)
    logs = logits.log_softmax(-1)
    own = logs.gather(-1, batch.completion_ids.unsqueeze(-1)).squeeze(-1)
    batch.logprobs["actor"], batch.collision["actor"] = own.detach(), logs.detach().exp().square().sum(-1)
    batch.shaped = torch.zeros(2, 3)
    energy = 1 - 2 * own.detach().exp() + batch.collision["actor"]
    for row, at in ((0, 0), (0, 2), (1, 1)):
        (score,) = torch.autograd.grad(own[row, at], logits, retain_graph=True)
        assert float(score.square().sum()) == pytest.approx(float(energy[row, at]))
    plugin = OTB(OTB.Options(loss="pg"))
    batch.advantages = plugin.compute_advantages(batch).advantages
    term = next(item for item in plugin.compute_loss(Outputs(logprobs=own), batch) if isinstance(item, LossTerm))
    (found,) = torch.autograd.grad(term.values.sum(), logits, retain_graph=True)
    (wanted,) = torch.autograd.grad(-(by_loops(batch, False) * own)[batch.action_mask].sum(), logits)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_its_gradient_varies_less_than_that_of_a_plain_mean():
    """Two tokens out of three, eight answers a group: with the baseline known exactly, no other has a smaller second moment."""
    random = torch.Generator().manual_seed(4)
    logits = 2 * torch.randn(2, 3, dtype=torch.float64, generator=random)
    chances = logits.softmax(-1)
    gains = 3 + torch.randn(3, 3, dtype=torch.float64, generator=random)
    first, then = chances[0], chances[1]
    whole = first.unsqueeze(1) * then
    collision = chances.square().sum(-1)
    energy = [1 - 2 * chances[at] + collision[at] for at in (0, 1)]
    total = energy[0].unsqueeze(1) + energy[1]
    best = float((whole * gains * total).sum() / (whole * total).sum())
    mean = float((whole * gains).sum())

    def moment(baseline):
        """``E‖∇ log π(y)·(R − b)‖²``: the squared norms of two tokens' scores add, because their logits are others."""
        return float((whole * total * (gains - baseline) ** 2).sum())

    assert moment(best) <= min(moment(mean), *(moment(best + step) for step in (-0.1, 0.1)))
    samples = torch.multinomial(whole.flatten(), 4096, replacement=True, generator=random)
    a, b = samples // 3, samples % 3
    batch = make_batch([2] * 4096, groups=[0] * 4096, rewards=gains[a, b].tolist())
    batch.logprobs["actor"] = torch.stack([first[a], then[b]], -1).log()
    batch.collision["actor"] = collision.expand(4096, 2)
    batch.shaped = torch.zeros(4096, 2)
    found = OTB(OTB.Options()).compute_advantages(batch).advantages
    assert float(gains[a[0], b[0]]) - float(found[0, 1]) == pytest.approx(best, abs=0.05)
    assert F.suffix_sum(batch.token_rewards, batch.action_mask).shape == found.shape
