"""Returns, GAE, whitening and the value loss against plain float64 loops and hand-worked cases."""

import math
import statistics

import pytest
import torch

from rlhf_host import functional as F

NAN = float("nan")


def random_batch(rows=7, width=11, seed=0):
    """Rewards, values and action masks with holes anywhere; one row acts everywhere, one nowhere."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(rows, width, generator=generator) < 0.6
    mask[0], mask[1] = True, False
    return rewards, values, mask


def loop_gae(rewards, values, gamma, lam, bootstrap):
    """One row, action tokens only, from the definition: a double sum over temporal differences."""
    following = [*values, bootstrap][1:]
    delta = [r + gamma * after - v for r, v, after in zip(rewards, values, following, strict=True)]
    return [sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, len(delta))) for t in range(len(delta))]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0), (0.0, 1.0), (0.5, 0.9)])
@pytest.mark.parametrize("bootstrapped", [False, True])
def test_gae_is_the_double_sum_over_action_tokens(gamma, lam, bootstrapped):
    rewards, values, mask = random_batch()
    bootstrap = torch.linspace(-1, 1, len(mask), dtype=torch.float64) if bootstrapped else None
    found = F.gae(rewards, values, mask, gamma, lam, bootstrap)
    assert found.dtype == torch.float32
    assert found[~mask].eq(0).all()
    for row, acts in enumerate(mask):
        last = float(bootstrap[row]) if bootstrapped else 0.0
        expected = loop_gae(rewards[row, acts].tolist(), values[row, acts].tolist(), gamma, lam, last)
        assert found[row, acts].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_gae_hand_worked():
    """γ = λ = 1/2, rewards 0 0 1, values 1 2 4: δ = 0, 0, −3 and A = −3/16, −3/4, −3; bootstrapped with 2, δ₃ = −2."""
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[1.0, 2.0, 4.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert F.gae(rewards, values, mask, 0.5, 0.5).tolist() == [[-3 / 16, -3 / 4, -3.0]]
    assert F.gae(rewards, values, mask, 0.5, 0.5, torch.tensor([2.0])).tolist() == [[-1 / 8, -1 / 2, -2.0]]


def test_without_discount_the_advantage_is_the_return_less_the_value():
    rewards, values, mask = random_batch(seed=3)
    expected = F.suffix_sum(rewards, mask) - torch.where(mask, values, 0.0).float()
    assert torch.allclose(F.gae(rewards, values, mask), expected, atol=1e-6)


@pytest.mark.parametrize("gamma", [1.0, 0.97, 0.0])
def test_discounted_sum_matches_a_loop(gamma):
    values, _, mask = random_batch(seed=4)
    found = F.discounted_sum(values, mask, gamma)
    assert found.dtype == torch.float32
    assert found[~mask].eq(0).all()
    for row, acts in enumerate(mask):
        x = values[row, acts].tolist()
        expected = [sum(gamma ** (s - t) * x[s] for s in range(t, len(x))) for t in range(len(x))]
        assert found[row, acts].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def gae_of(rewards, values, mask):
    return F.gae(rewards, values, mask, 0.9, 0.8, torch.full((len(mask),), 0.5))


def returns_of(rewards, values, mask):
    return F.discounted_sum(rewards, mask, 0.9)


@pytest.mark.parametrize("estimate", [gae_of, returns_of])
class TestAlongATrajectory:
    def test_observations_between_actions_are_as_if_not_there(self, estimate):
        rewards, values, _ = random_batch(rows=3, width=6)
        columns = torch.tensor([0, 1, 4, 5, 7, 10])  # two or three observation tokens after every turn, padding at the end
        mask = torch.zeros(3, 12, dtype=torch.bool).index_fill(1, columns, True)
        spread = [torch.full((3, 12), NAN, dtype=torch.float64).index_copy(1, columns, x) for x in (rewards, values)]
        alone = estimate(rewards, values, torch.ones(3, 6, dtype=torch.bool))
        assert torch.equal(estimate(*spread, mask)[:, columns], alone)

    def test_masked_garbage_padding_and_the_other_rows_change_nothing(self, estimate):
        rewards, values, mask = random_batch()
        clean = estimate(rewards, values, mask)
        dirty = [torch.where(mask, x, NAN) for x in (rewards, values)]
        assert torch.equal(estimate(*dirty, mask), clean)
        wide = [torch.nn.functional.pad(x, (0, 5), value=NAN) for x in dirty]
        assert torch.equal(estimate(*wide, torch.nn.functional.pad(mask, (0, 5)))[:, :11], clean)
        order = [3, 1, 6, 0]
        assert torch.equal(estimate(rewards[order], values[order], mask[order]), clean[order])

    def test_rewards_of_a_million_stay_exact_and_finite(self, estimate):
        mask = torch.ones(2, 600, dtype=torch.bool)
        rewards = torch.zeros(2, 600)
        rewards[:, -1] = torch.tensor([1e6, -1e6])
        found = estimate(rewards, torch.zeros(2, 600), mask)
        assert torch.isfinite(found).all()
        assert found[:, -1].tolist() == pytest.approx([1e6, -1e6])


def test_whitening_is_the_population_z_score_over_the_mask():
    advantages, _, mask = random_batch(seed=5)
    found = F.whiten(torch.where(mask, advantages, NAN), mask)
    kept = advantages[mask].tolist()
    mean, deviation = statistics.fmean(kept), statistics.pstdev(kept)
    assert found[mask].tolist() == pytest.approx([(x - mean) / deviation for x in kept], rel=1e-5, abs=1e-6)
    assert found[~mask].eq(0).all()
    assert found.dtype == torch.float32


def test_whitening_can_subtract_only():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    found = F.whiten(torch.tensor([[1.0, 2.0, NAN], [6.0, NAN, NAN]]), mask, center_only=True)
    assert found.tolist() == [[-2.0, -1.0, 0.0], [3.0, 0.0, 0.0]]


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6, -1e6])
def test_whitening_what_does_not_vary_gives_zeros(value):
    mask = torch.ones(3, 7, dtype=torch.bool)
    assert F.whiten(torch.full((3, 7), value), mask).abs().max() < 1e-5
    assert F.whiten(torch.full((3, 7), value), torch.zeros_like(mask)).eq(0).all()


def test_the_variance_has_a_floor():
    """Two values 2e-5 apart: variance 1e-10 counts as 1e-8, so they become ±0.1 and not ±1."""
    found = F.whiten(torch.tensor([[-1e-5, 1e-5]]), torch.ones(1, 2, dtype=torch.bool))
    assert found[0].tolist() == pytest.approx([-0.1, 0.1])


def test_whitening_permuted_rows_permutes_the_result():
    advantages, _, mask = random_batch(seed=6)
    order = [5, 2, 0, 6, 1, 4, 3]
    assert torch.allclose(F.whiten(advantages[order], mask[order]), F.whiten(advantages, mask)[order], atol=1e-6)


def loop_value_loss(value, old, target, clip):
    plain = (value - target) ** 2
    if clip is None:
        return 0.5 * plain
    near = old + min(max(value - old, -clip), clip)
    return 0.5 * max(plain, (near - target) ** 2)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_value_loss_and_its_gradient_match_a_loop_and_finite_differences(clip):
    generator = torch.Generator().manual_seed(7)
    values, old, returns = (torch.randn(5, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    values.requires_grad_()
    loss = F.value_loss(values, old, returns, torch.ones(5, 8, dtype=torch.bool), clip)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    step = 1e-6
    for found, slope, v, o, g in zip(*(x.flatten().tolist() for x in (loss, gradient, values, old, returns)), strict=True):
        assert found == pytest.approx(loop_value_loss(v, o, g, clip), rel=1e-12)
        numeric = (loop_value_loss(v + step, o, g, clip) - loop_value_loss(v - step, o, g, clip)) / (2 * step)
        assert slope == pytest.approx(numeric, rel=1e-5, abs=1e-8)


def test_the_value_loss_hand_worked():
    """Old value 0, ε 0.5. V = 2 clips to 0.5: for G = 0 the larger error is 2, for G = 3 it is the clipped one, 2.5, and no
    gradient is left; V = 0.25 is inside the range."""
    values = torch.tensor([[2.0, 2.0, 0.25]], requires_grad=True)
    loss = F.value_loss(values, torch.zeros(1, 3), torch.tensor([[0.0, 3.0, 1.25]]), torch.ones(1, 3, dtype=torch.bool), 0.5)
    loss.sum().backward()
    assert loss.tolist() == [[2.0, 3.125, 0.5]]
    assert values.grad.tolist() == [[2.0, 0.0, -1.0]]


@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_value_loss_is_finite_and_blind_to_what_is_masked(clip):
    mask = torch.tensor([[True, False, True], [False, False, False]])
    found = []
    for garbage in (0.0, NAN, math.inf):
        values, old, returns = (
            torch.where(mask, x, garbage) for x in (torch.full((2, 3), 2.0), torch.ones(2, 3), torch.full((2, 3), 1e6))
        )
        values.requires_grad_()
        loss = F.value_loss(values, old, returns, mask, clip)
        loss.sum().backward()
        assert torch.isfinite(loss).all()
        assert loss[~mask].eq(0).all()
        assert values.grad[~mask].eq(0).all()
        found.append((loss.detach(), values.grad))
    assert all(torch.equal(loss, found[0][0]) and torch.equal(gradient, found[0][1]) for loss, gradient in found)
