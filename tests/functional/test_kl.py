"""KL estimators: values, and the expected gradient that each promises."""

import math

import pytest
import torch

from rlhf_host import functional as F

MASK = torch.ones(1, 5, dtype=torch.bool)


def test_values_follow_the_definitions():
    x = torch.tensor([[0.5, -0.25, 0.0, 1.0, -2.0]], dtype=torch.float64)
    reference = torch.zeros_like(x)
    assert torch.equal(F.kl_estimate(x, reference, MASK, "k1"), x)
    assert torch.allclose(F.kl_estimate(x, reference, MASK, "k2"), x**2 / 2)
    assert torch.allclose(F.kl_estimate(x, reference, MASK, "k3"), torch.exp(-x) - 1 + x)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_masked_garbage_changes_nothing_and_gradients_stay_finite(estimator):
    mask = torch.tensor([[True, False, True]])
    clean = torch.tensor([[0.1, 0.0, -0.3]], requires_grad=True)
    dirty = torch.tensor([[0.1, float("nan"), -0.3]], requires_grad=True)
    reference = torch.tensor([[0.0, -float("inf"), 0.2]])
    for logprobs in (clean, dirty):
        F.kl_estimate(logprobs, reference, mask, estimator).sum().backward()
    assert torch.equal(clean.grad, dirty.grad)
    assert dirty.grad[0, 1] == 0


def test_large_gaps_stay_finite():
    gap = torch.tensor([[50.0, -50.0, 1000.0, -1000.0, 0.0]], requires_grad=True)
    for estimator in ("k1", "k2", "k3"):
        value = F.kl_estimate(gap, torch.zeros_like(gap), MASK, estimator)
        (gradient,) = torch.autograd.grad(value.sum(), gap)
        assert torch.isfinite(value).all()
        assert torch.isfinite(gradient).all()


def test_the_unbiased_loss_has_the_gradient_of_the_true_divergence():
    """Exact expectation over a small vocabulary, sampled from another policy: the weight corrects for it."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(6, dtype=torch.float64).log_softmax(-1)
    sampling = (logits.detach() + 0.3 * torch.randn(6, dtype=torch.float64)).log_softmax(-1)
    policy = logits.log_softmax(-1)
    (true,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    mask = torch.ones(1, 6, dtype=torch.bool)
    loss = F.kl_loss(policy[None], reference[None], mask, "unbiased", sampling[None])[0]
    (found,) = torch.autograd.grad((sampling.exp() * loss).sum(), logits)
    assert torch.allclose(found, true, atol=1e-12)


def test_the_unbiased_loss_is_k2_where_nobody_knows_what_sampled():
    logprobs = torch.tensor([[-1.0, -2.0, float("nan")]], dtype=torch.float64, requires_grad=True)
    reference, mask = torch.tensor([[-1.5, -1.0, 0.0]], dtype=torch.float64), torch.tensor([[True, True, False]])
    sampling = torch.tensor([[-1.2, float("nan"), float("nan")]], dtype=torch.float64)
    loss = F.kl_loss(logprobs, reference, mask, "unbiased", sampling)
    assert loss[0].tolist() == pytest.approx([math.exp(0.2) * 0.125, 0.5, 0.0])
    loss.sum().backward()
    assert logprobs.grad[0].tolist() == pytest.approx([math.exp(0.2) * 0.5, -1.0, 0.0])


def test_k1_is_refused_as_a_loss():
    with pytest.raises(ValueError, match="zero expected gradient"):
        F.kl_loss(torch.zeros(1, 5), torch.zeros(1, 5), MASK, "k1")
