"""Policy losses against float64 loops, hand-worked cases and finite differences."""

import math

import pytest
import torch

from rlhf_host import functional as F
from rlhf_host.testing.tensors import make_batch
from rlhf_host.types import LossTerm, Metric, Outputs


def clip_loop(logprob, old, advantage, low, high, dual):
    ratio = math.exp(logprob - old)
    clipped = min(max(ratio, 1 - low), 1 + high)
    value = min(ratio * advantage, clipped * advantage)
    if advantage < 0 and dual is not None:
        value = max(value, dual * advantage)
    return -value


@pytest.mark.parametrize("dual", [None, 3.0])
def test_clip_matches_a_loop(dual):
    generator = torch.Generator().manual_seed(1)
    logprobs, old, advantages = (torch.randn(6, 9, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.ones(6, 9, dtype=torch.bool)
    options = F.PolicyLossOptions(clip_eps=0.2, clip_eps_high=0.28, dual_clip=dual)
    values, _ = F.policy_losses["clip"](logprobs, old, advantages, mask, options)
    expected = [
        [clip_loop(*items, 0.2, 0.28, dual) for items in zip(*rows, strict=True)]
        for rows in zip(logprobs.tolist(), old.tolist(), advantages.tolist(), strict=True)
    ]
    assert torch.allclose(values, torch.tensor(expected, dtype=torch.float64))


def test_clip_hand_worked():
    """Ratio 1.5 with A = 2 is cut at 1.28; ratio 0.5 with A = -1 at 0.8; ratio 5 with A = -1 at the dual clip 3."""
    logprobs = torch.tensor([[1.5, 0.5, 5.0]]).log()
    mask = torch.ones(1, 3, dtype=torch.bool)
    values, metrics = F.policy_losses["clip"](
        logprobs, torch.zeros(1, 3), torch.tensor([[2.0, -1.0, -1.0]]), mask, F.PolicyLossOptions()
    )
    assert values[0].tolist() == pytest.approx([-2.56, 0.8, 3.0])
    assert metrics[0].values[0].tolist() == [1.0, 1.0, 1.0]


def test_at_ratio_one_the_clip_gradient_is_the_policy_gradient():
    advantages = torch.tensor([[1.0, -2.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    gradients = []
    for loss in ("clip", "pg"):
        logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
        values, _ = F.policy_losses[loss](logprobs, logprobs.detach(), advantages, mask, F.PolicyLossOptions())
        values.sum().backward()
        gradients.append(logprobs.grad)
    assert torch.equal(*gradients)
    assert gradients[0].tolist() == [[-1.0, 2.0]]


@pytest.mark.parametrize("loss", sorted(F.policy_losses))
def test_masked_garbage_gives_the_same_loss_and_finite_gradients(loss):
    found = []
    for garbage in (0.0, float("nan")):
        batch = make_batch([3, 5], seed=2)
        hole = ~batch.loss_mask
        logprobs = torch.where(hole, garbage, batch.sampler_logprobs + 0.1).requires_grad_()
        batch.advantages = torch.where(hole, garbage, torch.ones_like(batch.sampler_logprobs))
        batch.old_logprobs = torch.where(hole, garbage, batch.sampler_logprobs)
        terms = [i for i in F.policy_loss(Outputs(logprobs), batch, F.PolicyLossOptions(loss=loss)) if isinstance(i, LossTerm)]
        terms[0].values[batch.loss_mask].sum().backward()
        assert torch.isfinite(terms[0].values).all()
        found.append((terms[0].values.detach(), logprobs.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("loss", sorted(F.policy_losses))
@pytest.mark.parametrize("gap", [50.0, -50.0, 1e4])
def test_extreme_ratios_and_advantages_stay_finite(loss, gap):
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    advantages = torch.tensor([[1e6, -1e6]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    values, _ = F.policy_losses[loss](logprobs, logprobs.detach() - gap, advantages, mask, F.PolicyLossOptions(loss=loss))
    values.sum().backward()
    assert torch.isfinite(values).all()
    assert torch.isfinite(logprobs.grad).all()


def test_fused_mode_has_ratio_one_and_the_policy_gradient():
    batch = make_batch([4, 4], seed=3)
    batch.advantages = torch.ones_like(batch.sampler_logprobs)
    logprobs = batch.sampler_logprobs.clone().requires_grad_()
    term = next(i for i in F.policy_loss(Outputs(logprobs), batch, F.PolicyLossOptions()) if isinstance(i, LossTerm))
    assert term.corrected
    assert term.values[batch.loss_mask].tolist() == [-1.0] * int(batch.loss_mask.sum())
    term.values.sum().backward()
    assert torch.equal(logprobs.grad, -batch.loss_mask.float())


def test_the_entropy_bonus_is_a_term_of_its_own():
    batch = make_batch([2, 3], seed=4)
    batch.advantages = torch.zeros_like(batch.sampler_logprobs)
    entropy = torch.ones_like(batch.sampler_logprobs)
    items = F.policy_loss(Outputs(batch.sampler_logprobs, entropy=entropy), batch, F.PolicyLossOptions(entropy_coef=0.01))
    bonus = next(i for i in items if isinstance(i, LossTerm) and i.name == "entropy")
    assert (bonus.coefficient, bonus.corrected) == (0.01, False)
    assert bonus.values[batch.loss_mask].eq(-1).all()
    assert any(isinstance(i, Metric) and i.name == "clip_fraction" for i in items)


@pytest.mark.parametrize("aggregation", ["mean", "sequence-mean-token-sum-over(0)", "sequence-mean-token-sum-over()"])
def test_unknown_aggregations_are_refused_with_the_list(aggregation):
    with pytest.raises(ValueError, match="sequence-mean-token-mean"):
        F.PolicyLossOptions(aggregation=aggregation)
